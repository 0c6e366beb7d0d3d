"""A reshard that dies at any moment, any number of times, ends with the same bytes, and shows nothing before the end.

Real processes, real signals. `BIGLOAD_DEATHS` says how many deaths to die; `make crash` takes some hundreds, on the
disk. Without it there are some dozens, on a file system in memory where there is one: a flush takes no time there.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import dying
import pytest

import bigload
from bigload.errors import OutputExistsError, WriteError
from bigload.layouts.resharding.reshard import reshard
from bigload.layouts.writing import files_in_progress as files_module
from bigload.layouts.writing import writer as writer_module
from bigload.planning.plan_file import write_plan
from builders import contents, make_checkpoint, open_descriptors

DEATHS = int(os.environ.get("BIGLOAD_DEATHS", "10"))
IN_MEMORY = Path("/dev/shm")


@pytest.fixture
def ground():
    """Where to die."""
    is_quick = "BIGLOAD_DEATHS" not in os.environ and os.access(IN_MEMORY, os.W_OK)
    folder = Path(tempfile.mkdtemp(prefix="bigload-crash-", dir=IN_MEMORY if is_quick else None))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A checkpoint of 250 kB, a plan for it, and what an older reshard to one of the outputs had written."""
    folder = tmp_path_factory.mktemp("crash")
    source = make_checkpoint(folder / "source", blocks=2, shards=2, hidden=64, vocab=256)
    write_plan(bigload.plan(source, {"cuda:0": "150KiB", "cpu": "100KiB"}, overhead=0), folder / "plan.json")
    reshard(make_checkpoint(folder / "other", blocks=1, shards=1), folder / "older", layout="shards")
    return folder


def die(folder, what, cases, **options):
    asked = {"what": what, "cases": [{**case, "out": str(folder / f"{n}" / "out")} for n, case in enumerate(cases)]}
    command = [sys.executable, dying.__file__, json.dumps({**asked, **options})]
    path = os.pathsep.join((str(Path(bigload.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_whatever_kills_it_it_is_gone_on_with_to_the_same_bytes(place, ground):
    source, plan = {"source": str(place / "source")}, {"source": str(place / "plan.json")}
    cases = [
        source,
        {**source, "threads": 3, "max_shard_bytes": None},
        {**source, "is_direct": False, "older": str(place / "older")},
        {**plan, "threads": 2, "verify": "none"},
        {**plan, "older": str(place / "older")},
        {**plan, "is_direct": False, "verify": "size"},
    ]
    counts = die(ground, "often", cases, deaths=DEATHS, seed=DEATHS)
    assert counts["killed"] + counts["refused"] >= DEATHS
    assert min(counts["killed"], counts["refused"], counts["finished"]) > DEATHS // 20


@pytest.mark.parametrize("older", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_kill_at_any_step_shows_nothing_that_is_not_complete(place, ground, older):
    case = {"source": str(place / "plan.json"), "max_shard_bytes": 120_000}
    if older:
        case["older"] = str(place / "older")
    counts = die(ground, "everywhere", [case], every=max(1, 900 // DEATHS))
    assert counts["killed"] >= min(DEATHS // 4, 100)


# Damage


def flip(path, choose):
    content = bytearray(path.read_bytes())
    content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
    path.write_bytes(content)


def cut_off(path, choose):
    os.truncate(path, choose.randrange(path.stat().st_size))


def grow(path, choose):
    with path.open("ab") as file:
        file.write(choose.randbytes(choose.randrange(1, 9000)))


def remove(path, choose):
    path.unlink()


def fill_with_junk(path, choose):
    path.write_bytes(choose.randbytes(path.stat().st_size))


def make_link(path, choose):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def make_folder(path, choose):
    path.unlink()
    (path / "inside").mkdir(parents=True)


def make_fifo(path, choose):
    path.unlink()
    os.mkfifo(path)


def put_a_stray(path, choose):
    (path.parent / "other.safetensors.index.json").write_text("{}")
    (path.parent / "stray").write_text("stray")


DAMAGES = (flip, flip, flip, cut_off, grow, remove, fill_with_junk, make_link, make_folder, make_fifo, put_a_stray)


@pytest.fixture(scope="module")
def leftover(place, tmp_path_factory):
    """The staging folder of a run that was killed when it had everything, and the output of one that was not."""
    folder = tmp_path_factory.mktemp("leftover")
    die(folder, "leave", [{"source": str(place / "plan.json")}])
    reshard(place / "plan.json", folder / "expected", max_shard_bytes=60_000)
    return folder


@pytest.mark.parametrize("seed", range(DEATHS))
@pytest.mark.sample(10)
def test_whatever_happened_to_what_was_left_the_bytes_are_right_or_it_is_refused(place, leftover, tmp_path, seed):
    choose = random.Random(seed)
    shutil.copytree(leftover / "0" / "out.partial", tmp_path / "out.partial")
    files = sorted(path for path in (tmp_path / "out.partial").rglob("*") if path.is_file())
    for _ in range(choose.randrange(1, 4)):
        damage, path = choose.choice(DAMAGES), choose.choice(files)
        if path.is_file() and not path.is_symlink() and path.stat().st_size:
            damage(path, choose)
    before = sorted(tmp_path.rglob("*"))
    descriptors = open_descriptors()
    try:
        reshard(
            place / "plan.json", tmp_path / "out", max_shard_bytes=60_000, resume=True, threads=choose.choice((1, 3))
        )
    except OutputExistsError:  # the journal is another's, or none
        assert sorted(tmp_path.rglob("*")) == before
    except WriteError:  # a folder that is not empty stands where a file should be
        assert not (tmp_path / "out").exists()
    else:
        assert contents(tmp_path / "out") == contents(leftover / "expected")
        assert not (tmp_path / "out.partial").exists()
    assert open_descriptors() == descriptors


def test_what_was_left_whole_is_not_written_again(place, leftover, tmp_path):
    shutil.copytree(leftover / "0" / "out.partial", tmp_path / "out.partial")
    report = reshard(place / "plan.json", tmp_path / "out", max_shard_bytes=60_000, resume=True)
    assert (report.kept_files, report.written_bytes) == (len(report.output.files), 0)
    assert contents(tmp_path / "out") == contents(leftover / "expected")


def test_what_is_published_is_not_done_again(place, tmp_path):
    first = reshard(place / "plan.json", tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = reshard(place / "plan.json", tmp_path / "out", resume=True)
    assert (again.written_bytes, again.kept_files) == (0, len(first.output.files))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    with pytest.raises(OutputExistsError):
        reshard(place / "plan.json", tmp_path / "out", resume=True, max_shard_bytes=60_000)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


# A cut of the power


@pytest.mark.parametrize("threads", [1, 3])
def test_what_later_steps_rely_on_is_flushed_before_them(place, tmp_path, monkeypatch, threads):
    """Bytes before the journal and the documents, documents before the manifest, folders before the rename."""
    events = recorded(monkeypatch)
    monkeypatch.setattr(writer_module, "WINDOW_BYTES", 16384)
    monkeypatch.setattr(files_module, "NOTE_EVERY_BYTES", 32768)
    report = reshard(place / "plan.json", tmp_path / "out", threads=threads)
    partial = f"{tmp_path}/out.partial"
    rename = events.index(("rename", f"{partial} -> {tmp_path}/out"))
    journal = f"{partial}/.bigload-journal-0.jsonl"
    weights = [f"{partial}/{output.file}" for output in report.output.files]
    unflushed, noted = set(), 0
    for call, path in events:
        noted += call == "line"
        if call in ("pwrite", "write", "ftruncate"):
            unflushed.add(path)
        elif call in ("fsync", "fdatasync"):
            unflushed.discard(path)
    # A line for the recipe, one for each finished file, and one for each part of a file. Several threads may finish a
    # file before its windows in order reach the next part, so only one thread writes a known number of lines.
    assert noted > len(weights) + (2 if threads == 1 else 0)
    assert {journal, *weights} <= {path for _, path in events}
    assert not unflushed
    last = {path: max(n for n, event in enumerate(events) if event == ("fsync", path)) for path in flushed(events)}
    documents = [f"{partial}/{name}" for name in (*report.output.documents, "config.json")]
    manifest = f"{partial}/bigload-manifest.json"
    assert max(last[path] for path in weights) < min(last[path] for path in documents)
    assert [path for path in documents if path in last and "index" in path] == sorted(
        (path for path in documents if "index" in path), key=last.__getitem__
    )
    assert max(last[path] for path in documents) < last[manifest]
    folders = {partial, *(os.path.dirname(path) for path in weights)}  # noqa: PTH120 - texts as the system gave them
    assert len(folders) == 4
    assert last[manifest] < min(last[folder] for folder in folders)
    assert max(last[folder] for folder in folders) < rename < last[str(tmp_path)]


def test_a_tensor_is_noted_after_its_bytes_were_flushed(place, tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "WINDOW_BYTES", 8192)
    monkeypatch.setattr(files_module, "NOTE_EVERY_BYTES", 8192)
    events = recorded(monkeypatch)
    report = reshard(place / "source", tmp_path / "out", threads=1, max_shard_bytes=None)
    (output,) = report.output.files
    stops = {t.name: start + t.num_bytes for t, start in zip(output.tensors, output.starts(), strict=True)}
    written = flushed_to = 0
    seen = []
    for call, path in events:
        if call == "pwrite" and path.endswith(output.file):
            written += 8192
        elif call in ("fsync", "fdatasync") and path.endswith(output.file):
            flushed_to = written
        elif call == "line" and "tensors" in path:
            names = json.loads(path)["tensors"]
            assert all(stops[name] <= flushed_to for name in names)
            seen += names
    assert seen == list(stops)


def flushed(events):
    return {path for call, path in events if call == "fsync"}


def recorded(monkeypatch):
    """Record what is asked of the system, by name and path; what is written to a journal is a `line` as well."""
    events = []

    def path_of(descriptor):
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())

    def record(name):
        call = getattr(os, name)

        def recording(descriptor, *arguments, **options):
            path = path_of(descriptor)
            events.append((name, path))
            if name == "write":
                events.pop()
                events.extend((("line", arguments[0].decode()), (name, path)))
            return call(descriptor, *arguments, **options)

        monkeypatch.setattr(os, name, recording)

    for name in ("pwrite", "write", "fsync", "fdatasync", "ftruncate"):
        record(name)
    rename = os.rename

    def record_rename(source, target, **options):
        events.append(("rename", f"{source} -> {target}"))
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", record_rename)
    return events
