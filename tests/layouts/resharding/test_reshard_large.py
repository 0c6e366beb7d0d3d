"""Checkpoints larger than the memory that a reshard takes: memory, threads and descriptors are counted.

One has 4 GB, or 60 and 141 in the slow run, and its files are nearly all holes: holes stay holes, data stays data. The
other has 200 MB of data.
"""

import json
import shutil
import subprocess
import sys

import pytest

import bigload
import make as fixtures
from bigload.checkpoint.records.manifest import read_manifest
from bigload.layouts.options import ReshardOptions
from bigload.layouts.resharding.preparation import prepare_reshard
from bigload.layouts.resharding.reshard import reshard, run_reshard
from bigload.layouts.writing import files_in_progress as files_module
from bigload.planning.plan_file import write_plan
from builders import digest_of, make_checkpoint, stored_tensors

MIB = 1 << 20

RESHARD = """
import json, sys
from bigload.machine.memory.process_memory import peak_bytes  # VmHWM: ru_maxrss is inherited from the starter
from bigload.layouts.resharding.reshard import reshard

report = reshard(sys.argv[1], sys.argv[2])
modules = [name for name in ("torch", "numpy", "safetensors", "rich") if name in sys.modules]
print(json.dumps({"peak": peak_bytes(), "modules": modules, "stored": report.stored_bytes, "bytes": report.num_bytes}))
"""


@pytest.fixture(
    scope="module",
    params=["llama-4gb", *(pytest.param(each, marks=pytest.mark.slow) for each in ("opt-30b", "llama-70b"))],
)
def recipe(request):
    return fixtures.load_recipe(request.param)


@pytest.fixture(scope="module")
def resharded(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    made = fixtures.make(recipe, folder / "source", data="pattern")
    if sum(file.stat().st_blocks * 512 for file in made.shards) > 100 * MIB:
        pytest.skip("this file system stores holes")
    limits = {"cuda:0": recipe.total_bytes // 3, "cpu": recipe.total_bytes}
    write_plan(bigload.plan(folder / "source", limits, overhead=0), folder / "plan.json")
    command = [sys.executable, "-c", RESHARD, folder / "plan.json", folder / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return folder, json.loads(done.stdout)


def test_memory_stays_below_150_mib(resharded):
    assert resharded[1]["peak"] < 150 * MIB


def test_neither_torch_nor_numpy_is_imported(resharded):
    assert resharded[1]["modules"] == []


def test_holes_stay_holes(resharded, recipe):
    folder, report = resharded
    files = list((folder / "out").rglob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) == report["bytes"] > recipe.total_bytes > 4 * 10**9
    assert sum(file.stat().st_blocks * 512 for file in files) < 100 * MIB
    assert report["stored"] < 100 * MIB


def test_every_tensor_begins_with_its_pattern(resharded, recipe):
    checkpoint = bigload.open_checkpoint(resharded[0] / "out")
    assert len(checkpoint.tensors) == len(recipe.tensors)
    for name, tensor in checkpoint.tensors.items():
        with (checkpoint.root / tensor.span.file).open("rb") as file:
            file.seek(tensor.span.start)
            found = file.read(16)
        assert found == fixtures.pattern_of(name, tensor.dtype, tensor.num_bytes) + bytes(8), name


def test_space_is_asked_for_what_is_stored_only(resharded, tmp_path):
    prepared = prepare_reshard(resharded[0] / "plan.json", tmp_path / "again")
    assert prepared.stored_bytes < 100 * MIB < prepared.num_bytes


COUNTED = """
import json, os, sys, threading
from bigload.machine.memory.process_memory import peak_bytes
from bigload.layouts.resharding.reshard import reshard

before, descriptors, threads = peak_bytes(), [], []

def count(progress):
    descriptors.append(len(os.listdir("/proc/self/fd")))
    threads.append(threading.active_count())

first = len(os.listdir("/proc/self/fd"))
report = reshard(sys.argv[1], sys.argv[2], threads=4, max_shard_bytes=int(sys.argv[3]), on_progress=count)
last = len(os.listdir("/proc/self/fd"))
print(json.dumps({"grown": peak_bytes() - before, "bytes": report.num_bytes, "threads": max(threads),
    "descriptors": max(descriptors) - first, "left": last - first, "files": len(report.output.files)}))
"""


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    make_checkpoint(folder / "source", blocks=5, shards=4, hidden=2048, vocab=4096)
    yield folder / "source"
    shutil.rmtree(folder)


@pytest.mark.slow
def test_memory_threads_and_descriptors_do_not_grow_with_the_checkpoint(dense, tmp_path):
    command = [sys.executable, "-c", COUNTED, dense, tmp_path / "out", str(20 * MIB)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    counted = json.loads(done.stdout)
    assert counted["bytes"] > 200 * MIB
    assert counted["grown"] < 128 * MIB
    assert counted["threads"] <= 4 + 1
    # The lock, each of the sources past the page cache and through it, and the files that four threads are at.
    assert counted["files"] > 10
    assert counted["descriptors"] <= 1 + 2 * 4 + 4 + 2
    assert counted["left"] == 0


@pytest.mark.slow
def test_holes_and_data_of_one_tensor_come_out_as_they_are(tmp_path):
    """Data at odd places among holes, in a dtype in which zero bytes are not the number zero, too."""
    for dtype in ("BF16", "F8_E8M0"):
        source = tmp_path / dtype
        make_checkpoint(source, blocks=1, shards=1, hidden=2048, vocab=1024, dtype=dtype)
        path = source / "model.safetensors"
        content = path.read_bytes()
        places = (0, 5 * MIB + 77, 9 * MIB - 1)
        sparse = bytearray(len(content))
        sparse[: 64 << 10] = content[: 64 << 10]
        with path.open("wb") as file:
            file.truncate(len(content))
            file.write(content[: 64 << 10])
            for place in places[1:]:
                file.seek(place)
                file.write(b"data")
                sparse[place : place + 4] = b"data"
        report = reshard(source, tmp_path / f"{dtype}-out", max_shard_bytes=None)
        written = tmp_path / f"{dtype}-out" / "model.safetensors"
        assert stored_tensors(written) == stored_tensors(path)
        if path.stat().st_blocks * 512 < MIB:
            assert written.stat().st_blocks * 512 <= MIB
            assert report.stored_bytes < MIB < report.num_bytes
        record = read_manifest(tmp_path / f"{dtype}-out").files["model.safetensors"]
        assert record.digest == digest_of(written.read_bytes())
        (tensor,) = (t for t in report.output.files[0].tensors if t.name == "lm_head.weight")
        assert record.tensors[tensor.name] == digest_of(stored_tensors(written)[tensor.name][2])


def test_what_a_killed_run_left_of_a_sparse_file_is_gone_on_with_and_stays_sparse(tmp_path, monkeypatch):
    """Journaled holes are digested, not read; the rest is written to where it was."""
    made = fixtures.make(fixtures.load_recipe("llama-4gb"), tmp_path / "source", data="pattern")
    if sum(file.stat().st_blocks * 512 for file in made.shards) > 100 * MIB:
        pytest.skip("this file system stores holes")
    seen = []

    def stop(progress):
        seen.append(progress)
        if len(seen) == 40:
            raise KeyboardInterrupt

    monkeypatch.setattr(files_module, "NOTE_EVERY_BYTES", MIB)
    prepared = prepare_reshard(tmp_path / "source", tmp_path / "out", ReshardOptions(max_shard_bytes=10**9, threads=1))
    with pytest.raises(KeyboardInterrupt):
        run_reshard(prepared, on_progress=stop)
    report = reshard(tmp_path / "source", tmp_path / "out", max_shard_bytes=10**9, resume=True)
    assert report.kept_bytes > 10**8
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert sum(file.stat().st_blocks * 512 for file in files) < 100 * MIB
    checkpoint = bigload.open_checkpoint(tmp_path / "out")
    for name, tensor in checkpoint.tensors.items():
        with (checkpoint.root / tensor.span.file).open("rb") as file:
            file.seek(tensor.span.start)
            assert file.read(8) == fixtures.pattern_of(name, tensor.dtype, tensor.num_bytes)[:8], name
