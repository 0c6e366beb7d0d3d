import struct

import pytest

from bigload.checkpoint.model import Span
from bigload.devices import CPU, DISK, Device
from bigload.layouts.device_folders import CopyRange, OutputFile, lay_out, weight_maps
from bigload.planning.planner import plan
from builders import checkpoint_of

CUDA = Device("cuda", 0)


def laid_out(tensors, budget, **options):
    checkpoint = checkpoint_of(tensors)
    return lay_out(plan(checkpoint, budget, overhead=0), checkpoint, **options)


def held(files):
    return {output.file: [tensor.name for tensor in output.tensors] for output in files}


def output_of(tensors, order=None):
    checkpoint = checkpoint_of(tensors)
    members = tuple(checkpoint.tensors[name] for name in order or tensors)
    return OutputFile(device=CPU, file="cpu/model-00001-of-00001.safetensors", tensors=members)


def test_every_device_has_a_folder_and_the_disk_is_called_offload():
    tensors = {f"layers.{index}.proj.weight": 10 for index in range(7)}
    files = laid_out(tensors, {"cuda:0": 30, "cpu": 30})
    assert held(files) == {
        "cuda-0/model-00001-of-00001.safetensors": ["layers.0.proj.weight", "layers.1.proj.weight"],
        "cpu/model-00001-of-00001.safetensors": ["layers.2.proj.weight", "layers.3.proj.weight"],
        "offload/model-00001-of-00001.safetensors": [f"layers.{index}.proj.weight" for index in (4, 5, 6)],
    }
    assert [output.device for output in files] == [CUDA, CPU, DISK]


def test_a_device_without_weights_has_no_file():
    assert {output.device for output in laid_out({"a.weight": 10}, {"cuda:0": 100, "cpu": 100})} == {CUDA}


def test_layers_that_get_no_device_are_in_no_file():
    tensors = {"layers.0.a.weight": 4, "layers.1.a.weight": 4, "mtp.a.weight": 1}
    names = [name for names in held(laid_out(tensors, {"cpu": 100})).values() for name in names]
    assert names == ["layers.0.a.weight", "layers.1.a.weight"]


def test_a_stored_copy_is_written_beside_what_it_is_a_copy_of():
    table = ("U8", [4, 1])
    tensors = {"embed_tokens.weight": table, "layers.0.a.weight": 4, "layers.1.a.weight": 4, "lm_head.weight": table}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    checkpoint = checkpoint_of(tensors, config=config)
    made = plan(checkpoint, {"cuda:0": 8, "cpu": 100}, overhead=0)
    files = held(lay_out(made, checkpoint))
    assert set(files["cuda-0/model-00001-of-00001.safetensors"]) == {"embed_tokens.weight", "lm_head.weight"}


def test_tensors_come_in_execution_order_not_in_file_order():
    files = laid_out({f"layers.{index}.proj.weight": 1 for index in (10, 2, 1)}, {"cpu": 100})
    assert held(files)["cpu/model-00001-of-00001.safetensors"] == [
        f"layers.{index}.proj.weight" for index in (1, 2, 10)
    ]


def test_a_file_ends_before_the_tensor_that_would_take_it_past_the_limit():
    tensors = {f"layers.{index}.proj.weight": size for index, size in enumerate((4, 4, 4, 8, 1))}
    files = laid_out(tensors, {"cpu": 100}, max_shard_bytes=8)
    assert [[tensor.num_bytes for tensor in output.tensors] for output in files] == [[4, 4], [4], [8], [1]]
    assert [output.file for output in files] == [
        f"cpu/model-{index:05d}-of-00004.safetensors" for index in (1, 2, 3, 4)
    ]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_tensor_larger_than_the_limit_has_a_file_of_its_own(place):
    sizes = [2, 2]
    sizes.insert(place, 50)
    files = laid_out(
        {f"layers.{index}.proj.weight": size for index, size in enumerate(sizes)}, {"cpu": 100}, max_shard_bytes=8
    )
    assert [50] in [[tensor.num_bytes for tensor in output.tensors] for output in files]
    assert sum(len(output.tensors) for output in files) == 3


def test_neighbours_that_stay_neighbours_are_one_copy():
    output = output_of({"a": 10, "b": 20, "c": 5})
    assert output.copies() == (CopyRange(Span("model.safetensors", 0, 35), len(output.header)),)


def test_tensors_that_change_places_are_copies_of_their_own():
    output = output_of({"a": 10, "b": 20, "c": 5}, order=["c", "a", "b"])
    start = len(output.header)
    assert output.copies() == (
        CopyRange(Span("model.safetensors", 30, 35), start),
        CopyRange(Span("model.safetensors", 0, 30), start + 5),
    )


def test_a_tensor_without_bytes_needs_no_copy_and_parts_no_neighbours():
    output = output_of({"a": 10, "b": 20, "empty": 0}, order=["empty", "a", "empty", "b"])
    assert output.copies() == (CopyRange(Span("model.safetensors", 0, 30), len(output.header)),)


def test_equal_offsets_in_two_source_files_are_not_neighbours():
    one = output_of({"a": 10}).tensors[0]
    two = type(one)("b", one.dtype, one.shape, Span("other.safetensors", 10, 20))
    output = OutputFile(device=CPU, file="cpu/x", tensors=(one, two))
    assert [copy.source.file for copy in output.copies()] == ["model.safetensors", "other.safetensors"]


def test_data_starts_at_a_multiple_of_64_and_the_size_is_header_and_data():
    for count in range(1, 30):
        output = output_of({f"tensor.{index}": 3 for index in range(count)})
        assert len(output.header) % 64 == 0
        assert struct.unpack("<Q", output.header[:8]) == (len(output.header) - 8,)
        assert output.num_bytes == len(output.header) + 3 * count


def test_wide_types_come_first_where_odd_sizes_would_misalign_them():
    tensors = {
        "layers.0.proj.scale": ("F8_E4M3", [3]),
        "layers.1.proj.weight": ("F32", [2]),
        "layers.2.proj.weight": ("BF16", [1]),
    }
    (output,) = laid_out(tensors, {"cpu": 100})
    assert [tensor.dtype.name for tensor in output.tensors] == ["F32", "BF16", "F8_E4M3"]


def test_narrow_types_keep_their_place_where_nothing_is_misaligned():
    tensors = {"layers.0.proj.scale": ("F8_E4M3", [4]), "layers.1.proj.weight": ("F32", [2])}
    (output,) = laid_out(tensors, {"cpu": 100})
    assert [tensor.dtype.name for tensor in output.tensors] == ["F8_E4M3", "F32"]


def test_each_folder_maps_its_own_tensors_and_the_root_maps_all():
    files = laid_out(
        {f"layers.{index}.proj.weight": 10 for index in range(4)}, {"cuda:0": 60, "cpu": 20}, max_shard_bytes=10
    )
    maps = weight_maps(files)
    assert maps.keys() == {"", *{output.file.partition("/")[0] for output in files}}
    for output in files:
        folder, _, name = output.file.partition("/")
        for tensor in output.tensors:
            assert (maps[""][tensor.name], maps[folder][tensor.name]) == (output.file, name)
    assert len(maps[""]) == 4 == sum(len(names) for folder, names in maps.items() if folder)
