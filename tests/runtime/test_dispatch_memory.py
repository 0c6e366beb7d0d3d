"""The most memory that a process has had when it has loaded and dispatched a model, as the system counts it."""

import json
import subprocess
import sys

import pytest

from bigload.units import MIB
from builders import header_of

NUM_LAYERS, SIZE = 16, 4096
LAYER_BYTES = SIZE * SIZE * 4

LOAD = """
import json, sys
import torch, bigload, bigload.runtime.dispatch.load_and_dispatch, bigload.loading.load

path, device_map = sys.argv[1], json.loads(sys.argv[2])
with bigload.init_empty_weights():
    model = torch.nn.Sequential(*[torch.nn.Linear({size}, {size}, bias=False) for _ in range({num_layers})])
if device_map:
    bigload.load_checkpoint_and_dispatch(model, path, device_map, strict=True)
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """1 GiB in one file, all holes."""
    path = tmp_path_factory.mktemp("large") / "model.safetensors"
    header = header_of({f"{number}.weight": ("F32", (SIZE, SIZE)) for number in range(NUM_LAYERS)})
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + NUM_LAYERS * LAYER_BYTES)
    return path


def peak_bytes(checkpoint, device_map):
    """Return the peak since the program began: the system's `ru_maxrss` counts that of the process that forked it."""
    code = LOAD.format(size=SIZE, num_layers=NUM_LAYERS)
    command = [sys.executable, "-c", code, str(checkpoint), json.dumps(device_map)]
    return 1024 * int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
@pytest.mark.parametrize("num_on_disk", [0, 8, 16])
def test_beside_the_weights_in_ram_little_memory_is_used(checkpoint, num_on_disk):
    device_map = {str(number): "disk" if number < num_on_disk else "cpu" for number in range(NUM_LAYERS)}
    in_ram = (NUM_LAYERS - num_on_disk) * LAYER_BYTES
    used = peak_bytes(checkpoint, device_map) - peak_bytes(checkpoint, {})
    assert in_ram <= used + 16 * MIB
    assert used <= in_ram + 256 * MIB
