"""vLLM's loader on folders of quantised weights, without the kernels that compute with them: few run on a CPU.

As a program it loads each folder of its arguments, and prints what `loader_findings` returns. Importing vLLM takes most
of the time, so it is done once; each folder is loaded by a fork, which has a time limit of its own.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

IMPORT_SECONDS, FOLDER_SECONDS = 180, 60
_FILLING = 0x5A
_OF_ATTENTION = re.compile(r"\.attn\.(q|k|v|prob)_(scale|zero_point)$")
"""Parameters that no folder has, unless the KV cache is quantised too."""

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_EXPERTS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}


def loader_findings(*folders) -> dict[str, dict]:
    """Return by folder the parameters that differ from its tensors, the tensors in none, and the dtypes.

    Of one that vLLM has no layers for, the text with which it refuses it.

    Raises:
        AssertionError: a folder was not loaded to the end, or in time.
    """
    done = subprocess.run(
        [sys.executable, __file__, *map(str, folders)],
        capture_output=True,
        text=True,
        timeout=IMPORT_SECONDS + FOLDER_SECONDS * len(folders),
        check=False,
    )
    lines = [line.removeprefix("found: ") for line in done.stdout.splitlines() if line.startswith("found: ")]
    found = {folder: findings for line in lines for folder, findings in json.loads(line).items()}
    assert found.keys() == {*map(str, folders)}, done.stdout[-3000:] + done.stderr[-6000:]
    return found


def main(*folders: str) -> None:
    import vllm.model_executor.models  # noqa: F401 - before the forks

    _leave_out_kernels()
    for folder in folders:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            signal.alarm(FOLDER_SECONDS)
            _load(folder)
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            sys.stderr.write(f"{folder}: status {status}\n")


def _load(folder: str) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=folder, enforce_eager=True, skip_tokenizer_init=True, max_model_len=64, dtype="bfloat16"
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config), tempfile.NamedTemporaryFile() as store:
        init_distributed_environment(1, 0, f"file://{store.name}", 0, "gloo")
        initialize_model_parallel(1, 1)
        try:
            found = _findings(config, Path(folder))
        except ValueError as error:
            found = {"refused": str(error)}
        sys.stdout.write(f"found: {json.dumps({folder: found})}\n")


class _NoKernel:
    """What vLLM makes of a layer's configuration where it would choose a kernel."""

    def __init__(self, *_, **__):
        pass


def _leave_out_kernels() -> None:
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_wna16 as experts,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16 as packed

    linear.choose_scaled_mm_linear_kernel = lambda *_, **__: _NoKernel
    packed.choose_mp_linear_kernel = lambda *_, **__: _NoKernel
    experts.select_wna16_moe_backend = lambda *_, **__: (WNA16MoEBackend.MARLIN, _NoKernel)


def _findings(config, folder: Path) -> dict:
    import torch
    from safetensors.torch import load_file
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.utils.torch_utils import set_default_torch_dtype

    def content(tensor):
        return tensor.contiguous().flatten().view(torch.uint8)

    loader = get_model_loader(config.load_config)
    with set_default_torch_dtype(config.model_config.dtype):
        model = loader.create_model(config, config.model_config)
    for parameter in model.parameters():
        content(parameter.data).fill_(_FILLING)
    loader.load_weights(model, config.model_config)
    stored = {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}
    different, used, dtypes = [], set(), set()
    for name, parameter in model.named_parameters():
        if _OF_ATTENTION.search(name):
            continue
        parts = _parts(name, parameter.data, stored)
        used.update(parts)
        if name.endswith("weight_shape"):  # of the last of those that are fused; kernels do not read it
            continue
        missing = [part for part in parts if part not in stored]
        expected = None if missing else torch.cat([stored[part] for part in parts]).reshape(parameter.shape)
        if expected is not None and (expected.dtype, parameter.dtype) == (torch.bfloat16, torch.float32):
            expected = expected.float()  # vLLM keeps scales of rows in 32 bits
        if missing or expected.dtype != parameter.dtype or not torch.equal(content(expected), content(parameter.data)):
            different.append([name, str(parameter.dtype), list(parameter.shape), missing or str(expected.dtype)])
        dtypes.add(str(parameter.dtype))
    return {"different": different, "unused": sorted(set(stored) - used), "dtypes": sorted(dtypes)}


def _parts(name: str, parameter, stored) -> list[str]:
    """Return the names of the folder's tensors that vLLM's parameter `name` holds, in their order."""
    of_experts = re.fullmatch(r"(.*\.experts)\.(?:.*\.)?(w13|w2)_(.*)", name)
    if of_experts:
        prefix, fused, kind = of_experts.groups()
        return [f"{prefix}.{expert}.{part}.{kind}" for expert in range(len(parameter)) for part in _EXPERTS[fused]]
    module, kind = name.rsplit(".", 1)
    parent, _, fused = module.rpartition(".")
    return [f"{parent}.{part}.{kind}" for part in _FUSED[fused]] if fused in _FUSED else [name]


if __name__ == "__main__":
    main(*sys.argv[1:])
