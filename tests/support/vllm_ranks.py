"""Ranks of vLLM without its engine: models loaded by several load formats, compared tensor by tensor.

As a program it is one rank: it reads a request as JSON from its standard input, and writes what it found to the file
that the request names.
"""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

TIMEOUT_SECONDS = 500
"""Longer than nine tiny models take on a busy machine."""


def run_vllm_ranks(tp: int, models: dict, folder: Path) -> list[dict]:
    """Load each of `models`, folders by load format, in `tp` ranks; return for each rank what `_compared` found.

    Raises:
        AssertionError: a rank failed.
    """
    ranks, results = [], [folder / f"rank-{rank}.json" for rank in range(tp)]
    for rank, result in enumerate(results):
        request = {"tp": tp, "rank": rank, "models": models, "store": folder / "store", "result": result}
        with (folder / f"rank-{rank}.txt").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "VLLM_DIST_IDENT": f"{os.getpid()}-{tp}"},  # names memory that ranks share
            )
        with process.stdin as requests:
            requests.write(json.dumps(request, default=str))
        ranks.append(process)
    try:
        statuses = [process.wait(TIMEOUT_SECONDS) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert statuses == [0] * tp, "\n".join((folder / f"rank-{rank}.txt").read_text()[-3000:] for rank in range(tp))
    return [json.loads(result.read_text()) for result in results]


def main() -> None:
    request = json.load(sys.stdin)
    from vllm.distributed import destroy_model_parallel, init_distributed_environment, initialize_model_parallel
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    tp, rank = request["tp"], request["rank"]
    found = {}
    for name, folders in request["models"].items():
        loaded = {}
        for load_format, folder in folders.items():
            config = _config(folder, load_format, tp, rank)
            with _current(config):
                init_distributed_environment(tp, rank, f"file://{request['store']}", rank, "gloo")
                destroy_model_parallel()  # models with experts have one group more
                initialize_model_parallel(tp, 1)
                try:
                    loaded[load_format] = _loaded(config)
                except Exception as error:  # a result, as any other
                    if load_format == "auto":
                        raise
                    loaded[load_format] = f"{type(error).__name__}: {error}"
            gc.collect()
        found[name] = _compared(loaded)
    Path(request["result"]).write_text(json.dumps(found))


def _config(folder, load_format, tp, rank):
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=folder,
        load_format=load_format,
        tensor_parallel_size=tp,
        distributed_executor_backend="external_launcher",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        dtype="float32",
    )
    return arguments.create_engine_config()


def _current(config):
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(config)


def _loaded(config):
    """Return the model's tensors before they are processed, and the bytes that system calls read meanwhile."""
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.utils.torch_utils import set_default_torch_dtype

    config.compilation_config.static_forward_context.clear()
    loader = get_model_loader(config.load_config)
    with set_default_torch_dtype(config.model_config.dtype):
        model = loader.create_model(config, config.model_config)
        loader.load_weights(model, config.model_config)  # modules that this imports are bytes that are read, too
        for tensor in model.parameters():
            tensor.data.fill_(7)  # no loader may rely on what memory happens to hold
        before = _read_bytes()
        loader.load_weights(model, config.model_config)
        return dict(model.state_dict()), _read_bytes() - before


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def _compared(loaded) -> dict:
    """Return for each format an error, or its differences from vLLM's own and the bytes that it read."""
    wanted, _ = loaded["auto"]
    found = {}
    for load_format, result in loaded.items():
        if isinstance(result, str):
            found[load_format] = {"error": result}
            continue
        tensors, num_bytes = result
        different = sorted(tensors.keys() ^ wanted.keys())
        for name in tensors.keys() & wanted.keys():
            tensor, other = tensors[name], wanted[name]
            if load_format == "sharded_state" and ("embed_tokens" in name or "lm_head" in name):
                # vLLM's loader leaves what memory held in rows of padding, which no token has
                rows = int(other.ne(0).any(-1).sum())
                tensor, other = tensor[:rows], other[:rows]
            if tensor.dtype != other.dtype or not tensor.equal(other):
                different.append(name)
        found[load_format] = {"different": different, "read_bytes": num_bytes, "names": sorted(tensors)}
    return found


if __name__ == "__main__":
    main()
