"""Differences of two checkpoints are found by name, whatever files they lie in, and counted element by element."""

import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bigload
from bigload.errors import ReadError
from bigload.layouts import differences

torch = pytest.importorskip("torch")
safe = pytest.importorskip("safetensors.torch")


def _saved(folder, tensors, *, shards=1):
    folder.mkdir(exist_ok=True)
    names = list(tensors)
    files = {name: f"model-{1 + number % shards:05}-of-{shards:05}.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        safe.save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def _tensors():
    generator = torch.Generator().manual_seed(0)
    return {f"layers.{n}.weight": torch.randn(7, 5, generator=generator).bfloat16() for n in range(4)}


def test_the_same_tensors_in_other_files_are_equal(tmp_path):
    first, second = _saved(tmp_path / "a", _tensors()), _saved(tmp_path / "b", _tensors(), shards=3)
    report = bigload.diff(first, second)
    assert report.is_equal
    assert (report.num_equal, report.read_bytes) == (4, 2 * 4 * 35 * 2)
    torch.save(_tensors(), tmp_path / "c.bin")
    assert bigload.diff(first, tmp_path / "c.bin").is_equal


@pytest.mark.parametrize("window", [16, 4096])
@given(data=st.data())
def test_every_changed_element_counts(tmp_path_factory, window, data):
    dtype = data.draw(
        st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8])
    )
    count = data.draw(st.integers(1, 60))
    before = torch.arange(count).to(dtype)
    changes = data.draw(st.dictionaries(st.integers(0, count - 1), st.integers(1, 9), max_size=5))
    after = before.clone()
    for place, by in changes.items():
        after[place] += by
    folder = tmp_path_factory.mktemp("d")
    first, second = _saved(folder / "a", {"x": before}), _saved(folder / "b", {"x": after})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(differences, "WINDOW_BYTES", window)
        report = bigload.diff(first, second)
    changed = before != after
    assert report.is_equal == (not bool(changed.any()))
    if report.is_equal:
        return
    (found,) = report.changed
    assert (found.num_changed, found.num_elements) == (int(changed.sum()), count)
    if dtype.is_floating_point:
        apart = (before.double() - after.double()).abs()
        assert found.largest == pytest.approx(float(apart.max()))
        assert found.mean == pytest.approx(float(apart.mean()))
    else:
        assert (found.largest, found.mean) == (None, None)


def test_names_shapes_and_dtypes_differ_by_the_headers(tmp_path):
    first = {
        "same": torch.ones(3),
        "gone": torch.ones(2),
        "shape": torch.ones(2, 3),
        "kind": torch.ones(4),
        "int": torch.ones(4),
    }
    second = {"same": torch.ones(3), "new": torch.ones(2), "shape": torch.ones(3, 2), "kind": torch.ones(4).bfloat16()}
    second |= {"int": torch.ones(4, dtype=torch.int32)}
    report = bigload.diff(_saved(tmp_path / "a", first), _saved(tmp_path / "b", second))
    assert (report.only_first, report.only_second, report.num_equal) == (("gone",), ("new",), 1)
    found = {each.name: each for each in report.changed}
    assert found.keys() == {"shape", "kind", "int"}
    assert found["shape"].shapes == ((2, 3), (3, 2))
    assert found["shape"].num_changed is None
    assert (found["kind"].dtypes, found["kind"].num_changed, found["kind"].largest) == (("F32", "BF16"), 0, 0.0)
    assert (found["int"].dtypes, found["int"].num_changed) == (("F32", "I32"), None)


def test_values_that_are_no_numbers_do_not_hide_others(tmp_path):
    before = torch.tensor([math.nan, math.inf, 1.0, 2.0])
    after = torch.tensor([math.nan, -math.inf, 1.5, 2.0])
    (found,) = bigload.diff(_saved(tmp_path / "a", {"x": before}), _saved(tmp_path / "b", {"x": after})).changed
    assert (found.num_changed, found.largest, found.mean) == (2, 0.5, 0.125)


def test_without_torch_it_is_said_that_something_differs(tmp_path, monkeypatch):
    monkeypatch.setattr(differences, "_has_torch", lambda: False)
    first, second = _saved(tmp_path / "a", {"x": torch.ones(3)}), _saved(tmp_path / "b", {"x": torch.zeros(3)})
    assert bigload.diff(first, first).is_equal
    (found,) = bigload.diff(first, second).changed
    assert (found.num_changed, found.largest, found.mean) == (None, None, None)


def _later(path, seconds):
    state = path.stat()
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + int(seconds * 1e9)))


@pytest.fixture
def with_manifests(tmp_path):
    """Make two checkpoints that differ in one tensor of four, both with manifests."""
    changed = _tensors()
    changed["layers.2.weight"] = changed["layers.2.weight"] + 1
    both = _saved(tmp_path / "a", _tensors()), _saved(tmp_path / "b", changed, shards=3)
    for folder in both:
        bigload.write_manifest(folder)
    return both


def test_tensors_of_equal_digests_are_not_read(with_manifests):
    report = bigload.diff(*with_manifests)
    assert [each.name for each in report.changed] == ["layers.2.weight"]
    assert (report.num_equal, report.num_by_digest, report.read_bytes) == (3, 3, 2 * 35 * 2)
    whole = bigload.diff(*with_manifests, trust_digests=False)
    assert (whole.num_by_digest, whole.read_bytes) == (0, 4 * 2 * 35 * 2)
    assert (whole.changed, whole.num_equal) == (report.changed, report.num_equal)


def test_a_file_that_was_written_to_after_its_manifest_is_read(with_manifests):
    first, second = with_manifests
    path = first / "model-00001-of-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[bigload.open_checkpoint(first).tensors["layers.0.weight"].span.start] ^= 1
    path.write_bytes(content)
    _later(path, 5)
    report = bigload.diff(first, second)
    assert {each.name for each in report.changed} == {"layers.0.weight", "layers.2.weight"}
    assert report.num_by_digest == 0


def test_a_manifest_of_other_files_is_not_used(with_manifests):
    first, second = with_manifests
    path = first / "model-00001-of-00001.safetensors"
    state = path.stat()
    safe.save_file({**_tensors(), "more": torch.ones(3)}, path)
    names = dict.fromkeys((*_tensors(), "more"), path.name)
    (first / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    report = bigload.diff(first, second)
    assert (report.only_first, report.num_by_digest) == (("more",), 0)


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_change_is_found_in_files_of_the_page_cache_and_of_the_disk(tmp_path, is_cached):
    before = {"one": torch.randn(3), "two": torch.arange(3_000_001, dtype=torch.int16)}  # ends between two blocks
    after = {"one": before["one"] * 1, "two": before["two"].clone()}
    after["two"][-1] += 1
    folders = [_saved(tmp_path / name, each) for name, each in (("a", before), ("b", after))]
    for file in (file for folder in folders for file in folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            if not is_cached:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    (found,) = bigload.diff(*folders).changed
    assert (found.name, found.num_changed) == ("two", 1)


def test_a_file_cut_short_after_it_was_opened_is_an_error(tmp_path):
    first, second = (bigload.open_checkpoint(_saved(tmp_path / name, _tensors())) for name in "ab")
    (file,) = (tmp_path / "b").glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 8)
    with pytest.raises(ReadError, match="ended"):
        bigload.diff(first, second)


def test_tensors_without_elements_are_equal_wherever_they_lie(tmp_path):
    tensors = {"a": torch.ones(3), "b": torch.ones(0, 4), "c": torch.ones(2)}
    assert bigload.diff(*(_saved(tmp_path / name, tensors) for name in "ab")).num_equal == 3


def test_differences_whose_sum_float32_cannot_hold_have_a_mean(tmp_path):
    folders = [_saved(tmp_path / str(sign), {"a": torch.full((4,), sign * 1.5e38)}) for sign in (1, -1)]
    (found,) = bigload.diff(*folders).changed
    assert found.mean == pytest.approx(3e38)
