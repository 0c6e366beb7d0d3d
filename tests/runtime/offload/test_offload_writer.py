import contextlib
import errno
import json
import os
import resource
import threading
from pathlib import Path

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bigload
from bigload.errors import InvalidCheckpointError, OptionError, ReadError, WriteError
from bigload.runtime.offload.offload_writer import RECORDS_FILE, offload_writer
from builders import contents, open_descriptors

SCHEMA = Path(__file__).parents[3] / "docs" / "schemas" / "offload-1.0.json"
LONG_AGO = 10**18
"""Nanoseconds since 1970; files of that time are older than any record of them."""


def weights(number):
    return {"a": torch.full((4,), float(number)), "b": torch.arange(number, number + 3)}


def check(folder, expected):
    loader = bigload.OffloadedWeightsLoader(save_folder=folder)
    assert set(loader) >= set(expected)
    assert all(torch.equal(loader[name], tensor) for name, tensor in expected.items())


def inodes(folder):
    return {path.name: path.stat().st_ino for path in folder.glob("*.dat")}


def age(folder):
    """Have all weights be as old as the records say they were, and older than the records."""
    records = json.loads((folder / RECORDS_FILE).read_text())
    for name, record in records["weights"].items():
        os.utime(folder / f"{name}.dat", ns=(LONG_AGO, LONG_AGO))
        record["file"][2] = LONG_AGO
    (folder / RECORDS_FILE).write_text(json.dumps(records))


def test_a_folder_of_other_weights_is_never_taken_for_that_of_these(tmp_path):
    """accelerate uses a folder that has an index as it is: the second model computes with weights of the first."""
    for number in (1, 2, 1):
        bigload.offload_state_dict(tmp_path, weights(number))
        check(tmp_path, weights(number))


@pytest.mark.parametrize("records", ["as written", "old", "gone", "damaged"])
def test_what_a_folder_has_already_is_not_written_again(tmp_path, records):
    bigload.offload_state_dict(tmp_path, weights(1))
    if records == "old":
        age(tmp_path)
    elif records == "gone":
        (tmp_path / RECORDS_FILE).unlink()
    elif records == "damaged":
        (tmp_path / RECORDS_FILE).write_text('{"schema": "bigload.offload/1.0", "weights": {"a": 3}}')
    before = inodes(tmp_path)
    bigload.offload_state_dict(tmp_path, {**weights(1), "b": torch.arange(7)})
    after = inodes(tmp_path)
    assert after["a.dat"] == before["a.dat"]
    assert after["b.dat"] != before["b.dat"]
    check(tmp_path, {**weights(1), "b": torch.arange(7)})


@pytest.mark.parametrize("is_old", [False, True])
def test_a_file_that_somebody_else_wrote_to_is_found_out(tmp_path, is_old):
    bigload.offload_state_dict(tmp_path, weights(1))
    if is_old:
        age(tmp_path)
    with (tmp_path / "a.dat").open("r+b") as file:
        file.write(b"\xff" * 4)
    bigload.offload_state_dict(tmp_path, weights(1))
    check(tmp_path, weights(1))


def test_records_of_files_that_are_what_they_were_save_reading_them(tmp_path):
    bigload.offload_state_dict(tmp_path, weights(1))
    with (tmp_path / "a.dat").open("r+b") as file:
        file.write(b"\xff" * 4)
    age(tmp_path)  # as no file system does: the file changed and its time did not
    before = inodes(tmp_path)
    bigload.offload_state_dict(tmp_path, weights(1))
    assert inodes(tmp_path) == before


def test_another_form_of_the_same_bytes_is_another_weight(tmp_path):
    bigload.offload_state_dict(tmp_path, {"w": torch.zeros(4)})
    for other in (torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int32)):
        bigload.offload_state_dict(tmp_path, {"w": other})
        found = bigload.OffloadedWeightsLoader(save_folder=tmp_path)["w"]
        assert found.dtype == other.dtype
        assert torch.equal(found, other)


def test_other_weights_in_a_folder_stay(tmp_path):
    bigload.offload_state_dict(tmp_path, {"a": torch.ones(2)})
    bigload.offload_state_dict(tmp_path, {"b": torch.zeros(2)})
    check(tmp_path, {"a": torch.ones(2), "b": torch.zeros(2)})


def test_tied_tensors_are_one_file_with_several_names(tmp_path):
    shared = torch.randn(4, 4)
    state = {"embed": shared, "head": shared.detach(), "row": shared[0], "equal": shared.clone(), "turned": shared.T}
    for _ in range(2):
        bigload.offload_state_dict(tmp_path, state)
        check(tmp_path, state)
        found = inodes(tmp_path)
        assert found["embed.dat"] == found["head.dat"]
        assert len(set(found.values())) == 4
    loader = bigload.OffloadedWeightsLoader(save_folder=tmp_path)
    assert loader["embed"].data_ptr() == loader["head"].data_ptr()
    assert bigload.OffloadFolder.open(tmp_path).aliases == {"head": "embed"}


def test_tensors_without_elements_are_tied_to_nothing(tmp_path):
    bigload.offload_state_dict(tmp_path, {"a": torch.empty(0), "b": torch.empty(0, 3)})
    check(tmp_path, {"a": torch.empty(0), "b": torch.empty(0, 3)})


def test_weights_that_are_no_longer_tied_are_written_apart(tmp_path):
    shared = torch.zeros(4)
    bigload.offload_state_dict(tmp_path, {"a": shared, "b": shared})
    bigload.offload_state_dict(tmp_path, {"a": shared, "b": torch.ones(4)})
    check(tmp_path, {"a": torch.zeros(4), "b": torch.ones(4)})


def test_a_file_system_without_links_gets_copies(tmp_path, monkeypatch):
    def refuse(self, target):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    shared = torch.randn(4)
    bigload.offload_state_dict(tmp_path, {"a": shared, "b": shared})
    check(tmp_path, {"a": shared, "b": shared})
    assert len(set(inodes(tmp_path).values())) == 2


def test_equal_addresses_of_tensors_that_do_not_live_together_are_no_ties(tmp_path):
    numbers = {str(number): number for number in range(20)}
    with offload_writer(tmp_path) as writer:
        for name, number in numbers.items():
            writer.add(name, torch.full((1000,), float(number)))
    check(tmp_path, {name: torch.full((1000,), float(number)) for name, number in numbers.items()})
    source = bigload.StoredWeights(tmp_path)
    bigload.offload_state_dict(tmp_path / "copy", source)
    check(tmp_path / "copy", dict(source))


def test_tensors_on_meta_have_to_be_in_the_folder_already(tmp_path):
    bigload.offload_state_dict(tmp_path, {"a": torch.ones(2)})
    bigload.offload_state_dict(tmp_path, {"a": torch.empty(2, device="meta"), "b": torch.zeros(1)})
    check(tmp_path, {"a": torch.ones(2), "b": torch.zeros(1)})
    for name, shape in (("a", 3), ("c", 2)):
        with pytest.raises(bigload.AbsentWeightError, match=f"{name} .{shape}."):
            bigload.offload_state_dict(tmp_path, {name: torch.empty(shape, device="meta")})
    (tmp_path / "a.dat").unlink()
    with pytest.raises(bigload.AbsentWeightError, match="its file is missing"):
        bigload.offload_state_dict(tmp_path, {"a": torch.empty(2, device="meta")})


def fail(folder, state):
    """Write `state` into `folder`, and fail before the end."""
    with offload_writer(folder) as writer:
        for name, tensor in state.items():
            writer.add(name, tensor)
        raise KeyError


def test_a_writer_that_fails_leaves_no_index_of_a_mixture(tmp_path):
    bigload.offload_state_dict(tmp_path, weights(1))
    with pytest.raises(KeyError):
        fail(tmp_path, {"a": weights(2)["a"]})
    assert not (tmp_path / "index.json").exists()
    bigload.offload_state_dict(tmp_path, weights(1))
    check(tmp_path, weights(1))


def test_a_writer_that_fails_before_it_changed_anything_leaves_the_index(tmp_path):
    bigload.offload_state_dict(tmp_path, weights(1))
    with pytest.raises(KeyError):
        fail(tmp_path, {"a": weights(1)["a"], "c": torch.ones(2)})
    check(tmp_path, weights(1))
    assert "c" not in bigload.OffloadedWeightsLoader(save_folder=tmp_path)


def test_the_records_are_as_their_schema_says(tmp_path):
    bigload.offload_state_dict(tmp_path, {**weights(1), "scalar": torch.tensor(1.0), "empty": torch.empty(0)})
    document = json.loads((tmp_path / RECORDS_FILE).read_text())
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    assert document["weights"].keys() == {"a", "b", "scalar", "empty"}


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="file"):
        bigload.offload_state_dict(tmp_path / "file", weights(1))


def test_no_link_in_the_folder_is_written_through(tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.dat").symlink_to(outside)
    bigload.offload_state_dict(folder, {"a": torch.ones(2)})
    assert outside.read_bytes() == b"precious"
    assert not (folder / "a.dat").is_symlink()


def test_nobody_is_waited_for_who_writes_to_a_pipe_in_the_place_of_the_records(tmp_path):
    os.mkfifo(tmp_path / RECORDS_FILE)
    writer = threading.Thread(target=bigload.offload_state_dict, args=(tmp_path, weights(1)), daemon=True)
    writer.start()
    writer.join(timeout=30)
    assert not writer.is_alive()
    check(tmp_path, weights(1))


def test_writers_of_one_folder_wait_for_each_other(tmp_path):
    """Two models in one folder would be a mixture: whoever comes second finds weights of the first, or replaces all."""
    second = threading.Thread(target=bigload.offload_state_dict, args=(tmp_path, weights(2)), daemon=True)
    with offload_writer(tmp_path) as writer:
        second.start()
        for name, tensor in weights(1).items():
            writer.add(name, tensor)
        second.join(timeout=0.2)
        writer.finish()
        loader = bigload.OffloadedWeightsLoader(save_folder=tmp_path)
        check(tmp_path, weights(1))
    second.join(timeout=30)
    assert not second.is_alive()
    check(tmp_path, weights(2))
    with pytest.raises(ReadError, match="changed"):
        loader["a"]


class DiedError(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("step", range(8))
def test_whenever_a_writer_dies_no_index_tells_of_a_mixture(tmp_path, monkeypatch, step):
    """At every change of a name in the folder: what was staged becomes a file, and the index is taken away."""
    bigload.offload_state_dict(tmp_path, weights(1))
    left = iter(range(step))

    def dying(change):
        def changed(path, *others, **options):
            if next(left, None) is None:
                raise DiedError
            return change(path, *others, **options)

        return changed

    for name in ("replace", "unlink"):
        monkeypatch.setattr(Path, name, dying(getattr(Path, name)))
    try:
        bigload.offload_state_dict(tmp_path, weights(2))
        has_died = False
    except DiedError:
        has_died = True
    monkeypatch.undo()
    assert has_died == (step < 5)  # the index goes; two weights, records and index are put in place
    if not (tmp_path / "index.json").exists():
        assert has_died
    else:
        check(tmp_path, weights(2 if step >= 5 else 1))
    bigload.offload_state_dict(tmp_path, weights(2))
    check(tmp_path, weights(2))


def test_a_full_disk_leaves_what_was_there_before(tmp_path):
    bigload.offload_state_dict(tmp_path, weights(1))
    before = contents(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(WriteError, match=r"c\.dat"):
            bigload.offload_state_dict(tmp_path, {**weights(1), "c": torch.ones(4096)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path) == before


def test_what_is_no_tensor_is_refused(tmp_path):
    with pytest.raises(OptionError, match="_extra_state is no tensor but a dict"):
        bigload.offload_state_dict(tmp_path, {"_extra_state": {}})


def test_nothing_is_left_open_or_lying_about(tmp_path):
    before = open_descriptors()
    bigload.offload_state_dict(tmp_path, weights(1))
    dict(bigload.OffloadedWeightsLoader(save_folder=tmp_path))
    assert open_descriptors() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.dat", "b.dat", RECORDS_FILE, "index.json"]


@given(
    content=st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=3),
            lambda below: (
                st.lists(below, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["schema", "weights", "a", "dtype", "shape", "digest", "file"]), below, max_size=4
                )
            ),
        ).map(lambda value: json.dumps({"schema": "bigload.offload/1.0", "weights": value}).encode()),
    )
)
def test_records_of_any_content_do_no_harm(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("records")
    bigload.offload_state_dict(folder, weights(1))
    (folder / RECORDS_FILE).write_bytes(content)
    bigload.offload_state_dict(folder, weights(2))
    check(folder, weights(2))


entries = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "safetensors_file", "weight_name", "x"]), below, max_size=4
        )
    ),
)


@given(entry=entries, name=st.sampled_from(["a", "../a", "", "a\0", "index.json", "\ud800"]))
def test_entries_of_any_content_are_read_or_refused(tmp_path_factory, entry, name):
    folder = tmp_path_factory.mktemp("entries")
    bigload.offload_state_dict(folder, weights(1))
    (folder / "index.json").write_text(json.dumps({name: entry}))
    loader = bigload.OffloadedWeightsLoader(save_folder=folder)
    with contextlib.suppress(InvalidCheckpointError):
        loader[name]
