import os
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import bigload
import make as fixtures
from bigload.checkpoint.byte_source import PositionalReader
from bigload.dtypes import DTYPES
from bigload.errors import NotEnoughMemoryError, ReadError, StateDictMismatchError, UnsupportedDTypeError
from bigload.loading import checks as guards
from builders import DTYPE_BITS, llama_tensors, make_checkpoint, no_thread_left, open_descriptors, write_shard

SIX_BITS = {"F6_E2M3", "F6_E3M2"}
NEWER = {"F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2"}  # torch 2.6 has neither
LACKING = {name for name, of_torch in NEWER.items() if not hasattr(torch, of_torch)}
TORCH_DTYPES = sorted(DTYPE_BITS.keys() - SIX_BITS - LACKING)
thread_counts = pytest.mark.parametrize("threads", [1, 2, 4])


def refuse_to_open(path):
    pytest.fail(f"{path} was opened for reading")


def bytes_of(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def forms(tensors):
    return {name: (tensor.dtype, tuple(tensor.shape), bytes_of(tensor)) for name, tensor in tensors.items()}


def oracle(folder):
    """What the reference implementation loads from all shards of a folder."""
    return forms({name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()})


@contextmanager
def nothing_leaked():
    before = open_descriptors()
    with no_thread_left():
        yield
    assert open_descriptors() == before


def llama_module(blocks=4, *, tied=False, hidden=8, vocab=32, device=None, dtype=torch.bfloat16):
    """A module with the names and shapes of the checkpoints of `builders.make_checkpoint`."""
    factory = {"device": device, "dtype": dtype}

    def linear(out_features, in_features):
        return nn.Linear(in_features, out_features, bias=False, **factory)

    def block():
        attention = nn.ModuleDict({f"{projection}_proj": linear(hidden, hidden) for projection in "qkvo"})
        mlp = nn.ModuleDict({"up_proj": linear(2 * hidden, hidden), "down_proj": linear(hidden, 2 * hidden)})
        norm = nn.RMSNorm(hidden, **factory)
        return nn.ModuleDict({"input_layernorm": norm, "self_attn": attention, "mlp": mlp})

    module, model = nn.Module(), nn.Module()
    model.embed_tokens = nn.Embedding(vocab, hidden, **factory)
    model.layers = nn.ModuleList([block() for _ in range(blocks)])
    model.norm = nn.RMSNorm(hidden, **factory)
    model.register_buffer("inv_freq", torch.full((4,), 0.5), persistent=False)
    module.model, module.lm_head = model, linear(vocab, hidden)
    if tied:
        module.lm_head.weight = model.embed_tokens.weight
    return module


@thread_counts
@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_is_what_the_reference_implementation_loads(tmp_path, threads, shards):
    folder = make_checkpoint(tmp_path / "tiny", shards=shards)
    assert forms(bigload.load(folder, threads=threads)) == oracle(folder)


@thread_counts
def test_every_dtype_of_torch_is_what_the_reference_implementation_loads(tmp_path, threads):
    tensors = {}
    for dtype in TORCH_DTYPES:
        packed = dtype == "F4"
        tensors |= {f"{dtype}.matrix": (dtype, [3, 6]), f"{dtype}.empty": (dtype, [2, 0, 4])}
        tensors |= {} if packed else {f"{dtype}.scalar": (dtype, []), f"{dtype}.odd": (dtype, [5])}
    write_shard(tmp_path / "model.safetensors", tensors)
    loaded = forms(bigload.load(tmp_path, threads=threads))
    assert loaded == oracle(tmp_path)
    assert loaded.keys() == tensors.keys()


def test_random_values_survive_as_values(tmp_path):
    tiny = fixtures.load_recipe("tiny-llama")
    fixtures.make(tiny, tmp_path / "tiny", data="random")
    loaded = bigload.load(tmp_path / "tiny")
    assert all(torch.isfinite(tensor).all() for tensor in loaded.values())
    assert forms(loaded) == oracle(tmp_path / "tiny")


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no four-bit dtype")
def test_packed_four_bit_tensors_have_two_elements_in_each_of_torchs(tmp_path):
    write_shard(tmp_path / "model.safetensors", {"a": ("F4", [3, 8])})
    loaded = bigload.load(tmp_path)["a"]
    assert (loaded.dtype, tuple(loaded.shape)) == (torch.float4_e2m1fn_x2, (3, 4))


@pytest.mark.parametrize("dtype", sorted(SIX_BITS))
def test_six_bit_types_are_refused_before_a_byte_is_read(tmp_path, dtype):
    write_shard(tmp_path / "model.safetensors", {"a": ("F32", [2]), "b": (dtype, [4])})
    with pytest.raises(UnsupportedDTypeError, match=dtype):
        bigload.load(tmp_path, open_source=refuse_to_open)
    assert bigload.load(tmp_path, only=["a"]).keys() == {"a"}


def test_loaded_tensors_are_writable_and_leave_the_file_alone(tmp_path):
    file = write_shard(tmp_path / "model.safetensors", {"a": ("U8", [4])})
    before = file.read_bytes()
    bigload.load(tmp_path)["a"].zero_()
    assert file.read_bytes() == before


def test_only_the_tensors_asked_for_are_read_in_the_order_asked(tmp_path):
    folder = make_checkpoint(tmp_path / "tiny")
    wanted = ["lm_head.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"]
    seen = []
    loaded = bigload.load(folder, only=wanted, on_progress=seen.append)
    assert list(loaded) == wanted
    assert forms(loaded) == {name: oracle(folder)[name] for name in wanted}
    assert seen[-1].done_bytes == seen[-1].total_bytes == sum(len(bytes_of(tensor)) for tensor in loaded.values())


def test_an_unknown_name_is_refused_before_a_byte_is_read(tmp_path):
    folder = make_checkpoint(tmp_path / "tiny")
    with pytest.raises(KeyError, match="nope"):
        bigload.load(folder, only=["lm_head.weight", "nope"], open_source=refuse_to_open)


def test_no_names_load_nothing(tmp_path):
    assert bigload.load(make_checkpoint(tmp_path / "tiny"), only=[], open_source=refuse_to_open) == {}


def test_an_opened_checkpoint_loads_like_its_path(tmp_path):
    folder = make_checkpoint(tmp_path / "tiny")
    assert forms(bigload.load(bigload.open_checkpoint(folder))) == forms(bigload.load(str(folder)))


@thread_counts
def test_a_file_cut_off_since_it_was_opened_is_a_read_error_that_names_it(tmp_path, threads):
    checkpoint = bigload.open_checkpoint(make_checkpoint(tmp_path / "tiny", shards=3))
    shard = checkpoint.root / checkpoint.shards[1].file
    os.truncate(shard, shard.stat().st_size - 1)
    with nothing_leaked(), pytest.raises(ReadError) as caught:
        bigload.load(checkpoint, threads=threads)
    assert caught.value.path == shard


@thread_counts
def test_a_file_that_is_cut_off_during_the_load_is_a_read_error_that_names_it(tmp_path, threads):
    checkpoint = bigload.open_checkpoint(make_checkpoint(tmp_path / "tiny", shards=3))
    shard = checkpoint.root / checkpoint.shards[1].file

    def open_source(path):
        if path == shard:
            os.truncate(shard, shard.stat().st_size - 1)
        return PositionalReader(path)

    with nothing_leaked(), pytest.raises(ReadError, match="1 bytes too early") as caught:
        bigload.load(checkpoint, threads=threads, open_source=open_source)
    assert caught.value.path == shard


def test_a_file_that_was_replaced_since_it_was_opened_is_a_read_error_that_names_it(tmp_path):
    tensors = {"a": ("U8", [4]), "b": ("U8", [4])}
    shard = write_shard(tmp_path / "model.safetensors", tensors)
    checkpoint = bigload.open_checkpoint(tmp_path)
    write_shard(shard, dict(reversed(tensors.items())))
    with pytest.raises(ReadError, match="it changed since the checkpoint was opened") as caught:
        bigload.load(checkpoint, open_source=refuse_to_open)
    assert caught.value.path == shard


def test_a_file_that_holds_nothing_wanted_may_change(tmp_path):
    checkpoint = bigload.open_checkpoint(make_checkpoint(tmp_path / "tiny", shards=3))
    (checkpoint.root / checkpoint.shards[2].file).unlink()
    assert bigload.load(checkpoint, only=["model.embed_tokens.weight"])


def test_a_file_that_vanished_since_it_was_opened_is_a_read_error_that_names_it(tmp_path):
    checkpoint = bigload.open_checkpoint(make_checkpoint(tmp_path / "tiny", shards=3))
    shard = checkpoint.root / checkpoint.shards[2].file
    shard.unlink()
    with nothing_leaked(), pytest.raises(ReadError) as caught:
        bigload.load(checkpoint)
    assert caught.value.path == shard


@thread_counts
def test_a_fault_on_one_thread_ends_the_load_and_leaves_the_module_untouched(tmp_path, threads):
    class FaultySource(PositionalReader):
        def read_into(self, buffers, offset):
            if self.fails:
                raise ReadError(self.path, "Input/output error")
            super().read_into(buffers, offset)

    def open_source(path):
        source = FaultySource(path)
        source.fails = "00003-of" in path.name
        return source

    folder = make_checkpoint(tmp_path / "tiny", shards=4)
    module = llama_module()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with nothing_leaked(), pytest.raises(ReadError, match=r"00003-of-00004\.safetensors: Input/output error"):
        bigload.load(folder, into=module, threads=threads, open_source=open_source)
    assert forms(module.state_dict()) == forms(before)


def test_a_module_on_meta_is_left_on_meta_by_a_failed_load(tmp_path):
    checkpoint = bigload.open_checkpoint(make_checkpoint(tmp_path / "tiny", shards=2))
    module = llama_module(device="meta")
    (checkpoint.root / checkpoint.shards[1].file).unlink()
    with pytest.raises(ReadError):
        bigload.load(checkpoint, into=module)
    assert all(parameter.is_meta for parameter in module.parameters())


@thread_counts
def test_a_module_on_meta_becomes_the_checkpoint_without_a_second_copy(tmp_path, threads):
    folder = make_checkpoint(tmp_path / "tiny")
    module = llama_module(device="meta", dtype=torch.float32)
    loaded = bigload.load(folder, into=module, threads=threads)
    state = module.state_dict()
    assert forms(state) == oracle(folder)
    assert {name: tensor.data_ptr() for name, tensor in state.items()} == {
        name: tensor.data_ptr() for name, tensor in loaded.items()
    }
    assert all(isinstance(parameter, nn.Parameter) and parameter.requires_grad for parameter in module.parameters())


def test_a_module_with_memory_keeps_parameters_and_dtype_and_takes_the_values(tmp_path):
    folder = make_checkpoint(tmp_path / "tiny")
    module = llama_module(dtype=torch.float64)
    before = {name: (id(parameter), parameter.data_ptr()) for name, parameter in module.named_parameters()}
    loaded = bigload.load(folder, into=module)
    assert {name: (id(parameter), parameter.data_ptr()) for name, parameter in module.named_parameters()} == before
    for name, parameter in module.named_parameters():
        assert parameter.dtype == torch.float64
        assert torch.equal(parameter, loaded[name].double()), name


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_tied_weights_stay_one_parameter(tmp_path, device):
    folder = make_checkpoint(tmp_path / "tiny", tied=True)
    module = llama_module(tied=True, device=device)
    bigload.load(folder, into=module)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert bytes_of(module.lm_head.weight.detach()) == oracle(folder)["model.embed_tokens.weight"][2]


def test_buffers_that_are_not_saved_are_untouched(tmp_path):
    module = llama_module(device="meta")
    before = module.model.inv_freq
    bigload.load(make_checkpoint(tmp_path / "tiny"), into=module)
    assert module.model.inv_freq is before
    assert before.tolist() == [0.5] * 4


@pytest.mark.parametrize(
    "module",
    [llama_module(blocks=3), llama_module(blocks=5), llama_module(hidden=4), nn.Linear(2, 2)],
    ids=["fewer blocks", "more blocks", "other shapes", "another model"],
)
def test_a_module_that_does_not_match_is_refused_before_a_byte_is_read(tmp_path, module):
    folder = make_checkpoint(tmp_path / "tiny", blocks=4)
    with pytest.raises(StateDictMismatchError):
        bigload.load(folder, into=module, open_source=refuse_to_open)


def test_without_strict_what_matches_is_loaded_and_the_rest_left_alone(tmp_path):
    folder = make_checkpoint(tmp_path / "tiny", blocks=4)
    module = llama_module(blocks=5)
    before = module.model.layers[4].mlp.up_proj.weight.detach().clone()
    loaded = bigload.load(folder, into=module, strict=False)
    assert loaded.keys() == llama_tensors(4).keys()
    assert forms({name: module.state_dict()[name] for name in loaded}) == oracle(folder)
    assert torch.equal(module.model.layers[4].mlp.up_proj.weight, before)


def test_without_strict_tensors_that_the_module_lacks_are_not_read(tmp_path):
    seen = []
    module = nn.Module()
    module.lm_head = nn.Linear(8, 32, bias=False, device="meta")
    folder = make_checkpoint(tmp_path / "tiny")
    assert bigload.load(folder, into=module, strict=False, on_progress=seen.append).keys() == {"lm_head.weight"}
    assert seen[-1].total_bytes == 8 * 32 * 2


def test_a_checkpoint_larger_than_memory_is_refused_before_a_byte_is_read(tmp_path):
    made = fixtures.make(fixtures.load_recipe("llama-70b"), tmp_path / "llama-70b")
    if guards.available_memory() >= made.total_bytes:
        pytest.skip("this machine has room for 141 GB")
    with pytest.raises(NotEnoughMemoryError, match=r"llama-70b does not fit .* 131\.4\d GiB to load") as caught:
        bigload.load(tmp_path / "llama-70b", open_source=refuse_to_open)
    assert caught.value.needed_bytes >= made.total_bytes
    assert isinstance(caught.value, MemoryError)
    assert caught.value.hint.startswith(
        f"plan it over several devices, or leave more on disk: bigload plan {tmp_path / 'llama-70b'} -m cpu="
    )


def test_a_part_of_a_checkpoint_larger_than_memory_loads(tmp_path):
    fixtures.make(fixtures.load_recipe("llama-70b"), tmp_path / "llama-70b", data="pattern")
    name = "model.layers.79.input_layernorm.weight"
    loaded = bigload.load(tmp_path / "llama-70b", only=[name])[name]
    assert bytes_of(loaded)[:8] == fixtures.pattern_of(name, DTYPES["BF16"], 8)


def test_where_free_memory_is_unknown_the_load_goes_ahead(tmp_path, monkeypatch):
    monkeypatch.setattr(guards, "available_memory", lambda: None)
    assert bigload.load(make_checkpoint(tmp_path / "tiny"))


@pytest.mark.parametrize("spare", [0, -1])
def test_memory_that_is_just_enough_is_enough(tmp_path, monkeypatch, spare):
    folder = make_checkpoint(tmp_path / "tiny", blocks=1, shards=1)
    needed = sum(-(-len(content) // 64) * 64 for _, _, content in oracle(folder).values())
    monkeypatch.setattr(guards, "available_memory", lambda: needed + spare)
    if spare == 0:
        assert bigload.load(folder)
    else:
        with pytest.raises(NotEnoughMemoryError):
            bigload.load(folder)


def test_a_model_computes_the_same_after_a_round_trip(tmp_path):
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    from safetensors.torch import save_file

    save_file(source.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    bigload.load(tmp_path, into=model)
    values = torch.randn(3, 16)
    assert torch.equal(model(values), source(values))
    model(values).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("method", ["read", "direct", "mmap", "auto"])
@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir])
def test_what_is_no_file_any_more_is_a_read_error_that_names_it(tmp_path, put, method):
    path = write_shard(tmp_path / "model.safetensors", {"a": ("F32", [2])})
    opened = bigload.open_checkpoint(tmp_path)
    path.unlink()
    put(path)
    with nothing_leaked(), pytest.raises(ReadError, match=r"model\.safetensors.*not a regular file"):
        bigload.load(opened, method=method)


@pytest.mark.parametrize("method", ["read", "mmap"])
def test_tensors_are_on_the_cpu_whatever_the_default_device_of_torch(tmp_path, method):
    write_shard(tmp_path / "model.safetensors", {"a": ("F32", [2]), "empty": ("BF16", [0, 3])})
    with torch.device("meta"):
        loaded = bigload.load(tmp_path, method=method, threads=2)
        cast = bigload.load(tmp_path, method=method, dtype="bf16")
    assert {tensor.device.type for tensors in (loaded, cast) for tensor in tensors.values()} == {"cpu"}


def test_a_quantised_checkpoint_for_a_plain_module_is_named(tmp_path):
    tensors = {"qweight": ("I32", [64, 8]), "qzeros": ("I32", [1, 8]), "scales": ("F16", [1, 64])}
    write_shard(tmp_path / "model.safetensors", {f"0.{name}": form for name, form in tensors.items()})
    module = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
    with pytest.raises(StateDictMismatchError) as refused:
        bigload.load(tmp_path, into=module)
    assert "the checkpoint is quantised, 4 bits (AWQ)" in refused.value.hint
