from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bigload.runtime.hooks.send_to_device import find_device, send_to_device

META = torch.device("meta")
Pair = namedtuple("Pair", ["first", "second"])


@dataclass(frozen=True, slots=True)
class Frozen:
    hidden: torch.Tensor
    label: str = "kept"


class Named(list):
    name = None


class Strange(tuple):
    __slots__ = ()

    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


def x():
    return torch.ones(2)


@pytest.mark.parametrize(
    "make",
    [
        x,
        lambda: (x(), 1, None),
        lambda: [x(), [x()]],
        lambda: Pair(x(), "text"),
        lambda: Strange(x(), x()),
        lambda: torch.max(torch.ones(2, 2), dim=0),
        lambda: {"a": x(), 2: {"b": (x(),)}},
        lambda: OrderedDict(a=x(), b=3),
        lambda: defaultdict(list, a=x()),
        lambda: MappingProxyType({"a": x()}),
        lambda: Frozen(x()),
        lambda: nn.utils.rnn.pack_sequence([x()]),
    ],
)
def test_everything_arrives_in_a_container_of_the_same_type_and_the_original_stays(make):
    value = make()
    sent = send_to_device(value, "meta")
    assert type(sent) is type(value)
    if not isinstance(value, nn.utils.rnn.PackedSequence):
        assert find_device(sent) == META
        assert find_device(value) == torch.device("cpu")


@pytest.mark.parametrize(
    "value", [x(), (x(), [x()]), {"a": [x()]}, Frozen(x()), [1, "text", None, torch.float32], Pair(1, x())]
)
def test_what_is_there_already_is_passed_on_itself(value):
    assert send_to_device(value, "cpu") is value
    assert send_to_device(value, None) is value


def test_attributes_of_containers_are_kept():
    value = Named([x()])
    value.name = "batch"
    assert send_to_device(value, "meta").name == "batch"
    factory = defaultdict(list, a=x())
    assert send_to_device(factory, "meta")["new"] == []
    assert send_to_device(Frozen(x(), label="mine"), "meta").label == "mine"


def test_only_what_has_to_move_is_new():
    there, inner = torch.ones(2, device="meta"), [torch.ones(2, device="meta")]
    sent = send_to_device({"a": there, "b": inner, "c": x()}, "meta")
    assert sent["a"] is there
    assert sent["b"] is inner


@pytest.mark.parametrize("skip_keys", ["cache", ["cache", "other"], ("cache",), {"cache"}])
def test_values_of_skipped_keys_stay_as_they_are(skip_keys):
    @dataclass
    class Output:
        hidden: torch.Tensor
        cache: list

    cache = [x()]
    sent = send_to_device(({"cache": cache, "hidden": x()}, Output(x(), cache)), "meta", skip_keys=skip_keys)
    assert sent[0]["cache"] is cache
    assert sent[1].cache is cache
    assert sent[0]["hidden"].device == sent[1].hidden.device == META


def test_a_key_is_skipped_as_a_whole_word():
    assert send_to_device({"a": x()}, "meta", skip_keys="cache")["a"].device == META


def test_objects_that_can_move_are_asked_to_and_modules_and_classes_are_not():
    class Batch:
        def to(self, device):
            return ("moved", device)

    layer = nn.Linear(1, 1)
    sent = send_to_device([Batch(), layer, nn.Linear], "meta", non_blocking=True)
    assert sent == [("moved", META), layer, nn.Linear]
    assert layer.weight.device.type == "cpu"


def test_the_device_is_that_of_the_first_tensor():
    assert find_device([1, {"a": None, "b": (torch.ones(1, device="meta"), x())}]) == META
    assert find_device(Frozen(x())) == torch.device("cpu")
    assert find_device(["text", {}, None, Frozen]) is None


leaves = st.one_of(
    st.builds(lambda kind: torch.ones(1, device=kind), st.sampled_from(["cpu", "meta"])), st.none(), st.integers()
)
nested = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
        st.builds(Frozen, inner),
    ),
    max_leaves=12,
)


def shape(value):
    """Return the containers of `value`, with the devices of its tensors."""
    if isinstance(value, torch.Tensor):
        return value.device.type
    if isinstance(value, dict):
        return (dict, [(key, shape(item)) for key, item in value.items()])
    if isinstance(value, Frozen):
        return (Frozen, shape(value.hidden), value.label)
    return (type(value), [*map(shape, value)]) if isinstance(value, tuple | list) else value


def on_meta(shaped):
    if isinstance(shaped, tuple | list):
        return type(shaped)(map(on_meta, shaped))
    return "meta" if shaped == "cpu" else shaped


@given(nested)
def test_whatever_is_nested_keeps_its_form_and_the_original_its_devices(value):
    before = shape(value)
    sent = send_to_device(value, "meta")
    assert shape(sent) == on_meta(before)
    assert shape(value) == before
    assert send_to_device(sent, "meta") is sent
