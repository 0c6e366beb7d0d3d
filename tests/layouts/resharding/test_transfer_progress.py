"""Progress of a fetch or reshard of a remote checkpoint: bytes are counted as they come, not by finished windows."""

import json
from itertools import pairwise

import pytest
from plain_server import served_plainly

import bigload
from bigload.layouts.fetching.fetch import prepare_fetch
from bigload.layouts.fetching.options import FetchOptions
from builders import make_checkpoint
from hub_server import CHUNK_BYTES


@pytest.fixture
def model(tmp_path):
    """A model of 4 MB, and the sizes of its shards."""
    folder = make_checkpoint(tmp_path / "model", shards=2, blocks=1, hidden=256, vocab=4096)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4, "num_key_value_heads": 4}))
    return folder, {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}


def check(seen):
    """Check that bytes were counted upwards to the total, in steps of no more than a chunk of the server."""
    done = [0, *(progress.done_bytes for progress in seen)]
    assert done == sorted(done)
    assert done[-1] == seen[-1].total_bytes
    assert {progress.phase for progress in seen} == {"read"}


def steps(seen):
    done = [0, *(progress.done_bytes for progress in seen)]
    return [after - before for before, after in pairwise(done)]


def test_bytes_are_counted_as_they_come(served, model, tmp_path):
    seen = []
    served.add("org/tiny", model[0])
    bigload.fetch("org/tiny", tmp_path / "out", threads=1, on_progress=seen.append)
    check(seen)
    assert seen[-1].total_bytes == sum(path.stat().st_size for path in model[0].iterdir())
    assert max(steps(seen)) <= CHUNK_BYTES  # of windows of 8 MiB, which hold a whole shard


@pytest.mark.parametrize("options", [{"rank": 1, "tp": 2}, {"only": "model.layers"}])
def test_the_total_of_a_part_is_what_comes_of_it(served, model, tmp_path, options):
    seen = []
    served.add("org/tiny", model[0])
    bigload.fetch("org/tiny", tmp_path / "out", threads=1, on_progress=seen.append, **options)
    check(seen)
    assert max(steps(seen)) <= CHUNK_BYTES


def test_bytes_of_an_answer_that_was_cut_off_count_once(served, model, tmp_path):
    seen = []
    served.add("org/tiny", model[0])
    served.fault("cdn", cut_after=3 * CHUNK_BYTES, times=2)
    bigload.fetch("org/tiny", tmp_path / "out", threads=1, on_progress=seen.append)
    check(seen)
    assert sum(steps(seen)[:-1]) < seen[-1].total_bytes  # not yet all before the last chunk


@pytest.mark.parametrize("options", [{"max_shard_bytes": None}, {"tp": 2}])
def test_a_reshard_counts_what_it_reads(served, model, tmp_path, options):
    seen = []
    served.add("org/tiny", model[0])
    bigload.reshard("org/tiny", tmp_path / "out", on_progress=seen.append, **options)
    check(seen)
    checkpoint = bigload.open_checkpoint(model[0])
    assert seen[-1].total_bytes == sum(tensor.num_bytes for tensor in checkpoint.tensors.values())


@pytest.mark.filterwarnings("ignore::bigload.checkpoint.byte_source.WholeFilesWarning")
def test_a_server_without_ranges_counts_whole_files(served, model, tmp_path):
    folder, sizes = model
    seen = []
    with served_plainly(folder) as server:
        prepared = prepare_fetch(server.url, tmp_path / "out", FetchOptions(only=("model.layers",)))
        bigload.fetch(server.url, tmp_path / "out", only="model.layers", on_progress=seen.append)
    check(seen)
    assert seen[-1].total_bytes == prepared.transfer_bytes
    assert max(steps(seen)[:-1]) < min(sizes.values())


def test_a_fetch_that_goes_on_begins_with_what_is_there(served, model, tmp_path):
    served.add("org/tiny", model[0])
    seen, later = [], []

    def stop(progress):
        seen.append(progress)
        if progress.done_bytes > 0.75 * progress.total_bytes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bigload.fetch("org/tiny", tmp_path / "out", threads=1, on_progress=stop)
    bigload.fetch("org/tiny", tmp_path / "out", threads=1, on_progress=later.append)
    read = [progress for progress in later if progress.phase == "read"]
    check(read)
    assert read[0].done_bytes > 0.25 * read[0].total_bytes
    assert read[0].total_bytes == seen[0].total_bytes
