"""vLLM's engine in processes of its own: greedy tokens of a model folder.

As a program it answers one prompt: FOLDER LOAD_FORMAT TP, and prints the tokens as the last line.
"""

import json
import os
import subprocess
import sys

TIMEOUT_SECONDS = 300
"""Of which importing vLLM three times takes most."""


def greedy_tokens(folder, load_format: str, tp: int) -> list[int]:
    """Return the tokens with which vLLM continues a prompt.

    Raises:
        AssertionError: the engine failed.
    """
    # Threads bound to cores, as by default, want a NUMA node for each rank.
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [sys.executable, __file__, str(folder), load_format, str(tp)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("tokens: ")]
    assert len(lines) == 1, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("tokens: "))


def main(folder: str, load_format: str, tp: str) -> None:
    from vllm import LLM, SamplingParams

    model = LLM(
        model=folder,
        load_format=load_format,
        tensor_parallel_size=int(tp),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
    )
    sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
    (answer,) = model.generate([{"prompt_token_ids": [3, 5, 7, 11]}], sampling)
    sys.stdout.write(f"tokens: {json.dumps(list(answer.outputs[0].token_ids))}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
