"""The most memory that a process takes beside the weights when fused tensors are assembled from those of experts."""

import json
import subprocess
import sys

import pytest

from bigload.units import MIB
from builders import header_of

NUM_EXPERTS, NUM_LAYERS, WIDTH = 16, 2, 4096
LARGE, SMALL = 2048, 1
"""Rows of each of an expert's matrices."""

MOST_BESIDE = 96 * MIB

CODE = """
import json, sys, threading, time
from pathlib import Path
import torch, bigload
import bigload.runtime.dispatch.load_and_dispatch, bigload.runtime.streaming.streaming_hook, bigload.loading.load
from bigload.conversion.checkpoint_view import CheckpointView
from bigload.conversion.conversion import Conversion, as_stored
from bigload.conversion.with_transformers.recorded_tensor import RecordedTensor
from bigload.runtime.dispatch import packed_weights

path, device, prefetch, folder = sys.argv[1], sys.argv[2], sys.argv[3] == "streamed", sys.argv[4] or None

class Fused(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.both = torch.nn.Parameter(torch.empty({num_experts}, 2 * {inner}, {width}))

    def forward(self, x):
        return x + self.both[-1, -1, -1]

def view_for(model, checkpoint):
    def recorded(layer, expert, part):
        return RecordedTensor(as_stored(checkpoint.tensors[f"{{layer}}.experts.{{expert}}.{{part}}"]), torch.float32)
    tensors = {{}}
    for layer in range({num_layers}):
        parts = [torch.stack([recorded(layer, e, part) for e in range({num_experts})]) for part in ("w1", "w3")]
        tensors[f"{{layer}}.both"] = torch.cat(parts, 1).origin
    conversion = Conversion(tensors=tensors)
    return CheckpointView(checkpoint=checkpoint, tensors=conversion.of(checkpoint), conversion=conversion)

packed_weights.view_for = view_for

def private():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

with bigload.init_empty_weights():
    model = torch.nn.Sequential(*[Fused() for _ in range({num_layers})])
most, done = [private()] * 2, threading.Event()
def watch():
    while not done.wait(0.002):
        most[1] = max(most[1], private())
watcher = threading.Thread(target=watch)
watcher.start()
loaded = bigload.load_checkpoint_and_dispatch(
    model, path, {{"": device}}, offload_folder=folder, prefetch=prefetch, prefetch_bytes=0, resident_bytes=0
)
if folder is None:
    with torch.no_grad():
        loaded(torch.zeros(1))
done.set()
watcher.join()
print(json.dumps(most[1] - most[0]))
"""


def peak_bytes(folder, inner, *arguments):
    """Return how much private memory was added at most by layers of `inner` rows an expert, in a file of holes."""
    folder.mkdir()
    path = folder / "model.safetensors"
    names = [f"{n}.experts.{e}.{part}" for n in range(NUM_LAYERS) for e in range(NUM_EXPERTS) for part in ("w1", "w3")]
    text = json.dumps(header_of(dict.fromkeys(names, ("F32", (inner, WIDTH))))).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + NUM_LAYERS * layer_bytes(inner))
    code = CODE.format(num_experts=NUM_EXPERTS, inner=inner, width=WIDTH, num_layers=NUM_LAYERS)
    found = subprocess.run([sys.executable, "-c", code, str(path), *arguments], capture_output=True, check=False)
    assert found.returncode == 0, found.stderr.decode()
    return int(found.stdout)


def layer_bytes(inner):
    return NUM_EXPERTS * 2 * inner * WIDTH * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "way", "num_layers"),
    [("cpu", "loaded", NUM_LAYERS), ("disk", "streamed", 1), ("disk", "by module", 1), ("disk", "written", 0)],
)
def test_beside_the_weights_little_memory_is_taken(tmp_path, device, way, num_layers):
    """Layers of 1 GiB, compared with layers so small that only code and the like take memory."""
    arguments = [device, way, str(tmp_path / "offload") if way == "written" else ""]
    used = peak_bytes(tmp_path / "large", LARGE, *arguments) - peak_bytes(tmp_path / "small", SMALL, *arguments)
    beside = used - num_layers * (layer_bytes(LARGE) - layer_bytes(SMALL))
    assert beside <= MOST_BESIDE
