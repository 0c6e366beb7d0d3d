"""A remote checkpoint is benched over the network: no page cache, no raw reads, no other loaders."""

import pytest

from bigload.bench.bench_load import bench_load
from bigload.checkpoint.source import open_checkpoint
from bigload.errors import OptionError
from bigload.generation.planned_model import ModelMaker
from builders import make_checkpoint
from hub_server import served_hub


@pytest.fixture
def served(tmp_path, monkeypatch):
    with served_hub(monkeypatch, tmp_path / "cache") as server:
        server.add("org/tiny", make_checkpoint(tmp_path / "source"))
        yield server


def test_every_run_comes_over_the_network(served):
    report = bench_load("org/tiny", threads=(1, 2), runs=2, trace=False, sizes=False)
    assert report.is_remote
    assert not report.raw
    assert report.is_identical
    assert not [warning for warning in report.warnings if "cache" in warning.code]
    assert served.num_bytes > 6 * report.total_bytes


@pytest.mark.parametrize("option", ["cold", "warm", "peers"])
def test_what_a_network_has_not_is_refused(served, option):
    with pytest.raises(OptionError, match="over the network"):
        bench_load("org/tiny", **{option: True})


def test_a_run_of_a_remote_model_names_fetch(served):
    pytest.importorskip("transformers")
    with pytest.raises(OptionError, match="does not run remote checkpoints") as refused:
        ModelMaker.of(open_checkpoint("org/tiny"), asked_by="run")
    assert "bigload fetch hf://org/tiny@" in refused.value.hint
