import json
import sys

import pytest

from bigload.bench import peers
from bigload.bench.bench_load import bench_load
from bigload.bench.loaded_memory import MemoryKind
from bigload.bench.peers import CannotLoadError, Peer
from bigload.checkpoint.source import open_checkpoint
from bigload.loading.load import load
from builders import make_checkpoint

QUICK = {"threads": (1,), "runs": 1, "raw": False, "trace": False, "sizes": False, "peers": True}


@pytest.fixture
def tiny(tmp_path):
    return make_checkpoint(tmp_path / "models" / "tiny", shards=2)


def peer(prepare, *, name="other", package="pytest", suffixes=(".safetensors",)):
    return Peer(name, package, MemoryKind.PRIVATE, suffixes, prepare)


def results(tiny, monkeypatch, *found):
    monkeypatch.setattr(peers, "PEERS", found)
    return bench_load(tiny, **QUICK).peers


def test_a_peer_is_timed_and_its_bytes_are_compared(tiny, monkeypatch):
    (result,) = results(tiny, monkeypatch, peer(lambda target: lambda: dict(load(target.checkpoint))))
    assert len(result.measured.seconds) == 1
    assert (result.is_identical, result.problem) == (True, None)
    assert result.version


def test_other_bytes_are_told_and_not_fatal(tiny, monkeypatch):
    def changed(target):
        return lambda: {name: tensor + 1 for name, tensor in load(target.checkpoint).items()}

    (result,) = results(tiny, monkeypatch, peer(changed))
    assert result.is_identical is False


def test_one_that_is_not_installed_is_named(tiny, monkeypatch):
    (result,) = results(tiny, monkeypatch, peer(lambda target: None, package="no-such-package-anywhere"))
    assert (result.version, result.measured, result.problem) == (None, None, "not installed")


def test_one_that_fails_at_once_and_one_that_fails_later_are_told_and_not_fatal(tiny, monkeypatch):
    def fails(target):
        raise RuntimeError("first line\nsecond line")

    calls = []

    def fails_later(target):
        def run():
            calls.append(1)
            if len(calls) > 1:
                raise OSError("gone")
            return dict(load(target.checkpoint))

        return run

    at_once, later = sorted(
        results(tiny, monkeypatch, peer(fails), peer(fails_later, name="later")), key=lambda r: r.name == "later"
    )
    assert (at_once.problem, at_once.measured) == ("RuntimeError: first line", None)
    assert (later.problem, later.measured) == ("OSError: gone", None)


def test_one_that_reads_other_files_is_told(tiny, monkeypatch):
    (result,) = results(tiny, monkeypatch, peer(lambda target: None, suffixes=(".bin",)))
    assert result.problem == "reads .bin, not .safetensors"


def test_what_was_made_for_a_peer_is_gone_after_the_bench(tiny, monkeypatch):
    closed = []

    def prepare(target):
        target.opened.callback(closed.append, True)
        return lambda: dict(load(target.checkpoint))

    results(tiny, monkeypatch, peer(prepare))
    assert closed == [True]


def test_without_a_config_transformers_says_what_it_lacks(tiny):
    (tiny / "config.json").unlink()
    found = next(peer for peer in peers.PEERS if peer.name == "transformers")
    with pytest.raises(CannotLoadError, match=r"config\.json"):
        found.prepare(peers.PeerTarget(open_checkpoint(tiny), "cpu", None))


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("found", peers.PEERS, ids=lambda peer: peer.name)
def test_every_installed_peer_loads_the_same_bytes(tmp_path, monkeypatch, found):
    from make import load_recipe, make

    if found.version is None:
        pytest.skip(f"{found.package} is not installed")
    if ".safetensors" not in found.suffixes:
        pytest.skip("it reads other files")
    make(load_recipe("tiny-llama"), tmp_path / "models" / "tiny", data="random")
    (result,) = results(tmp_path / "models" / "tiny", monkeypatch, found)
    assert (result.problem, result.is_identical) == (None, True)
    assert len(result.measured.seconds) == 1
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["tiny"]
    assert found.package in {"torch", "safetensors"} or found.package.replace("-", "_").split(".")[0] in sys.modules


@pytest.mark.peers
def test_code_beside_the_weights_is_not_run(tiny):
    pytest.importorskip("transformers")
    config = {"model_type": "evil", "architectures": ["Evil"], "auto_map": {"AutoConfig": "evil.Config"}}
    (tiny / "config.json").write_text(json.dumps(config))
    (tiny / "evil.py").write_text(f"open({str(tiny / 'was_run')!r}, 'w')\nclass Config: pass\n")
    found = next(peer for peer in peers.PEERS if peer.name == "transformers")
    with pytest.raises(ValueError, match="custom code"):
        found.prepare(peers.PeerTarget(open_checkpoint(tiny), "cpu", None))
    assert not (tiny / "was_run").exists()
