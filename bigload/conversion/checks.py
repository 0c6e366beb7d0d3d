"""Checks of stored tensors that are fused: names, numbers of experts, dtypes and shapes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping

from bigload.checkpoint.model import StoredTensor
from bigload.conversion.strided_pieces import PiecedTensor
from bigload.units import counted

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")


def several_dtypes(made: Mapping[str, PiecedTensor], stored: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Yield a sentence for each tensor that would be made of stored ones of several dtypes."""
    for name, tensor in made.items():
        dtypes = dict.fromkeys(stored[source].dtype.name for source in tensor.sources)
        if len(dtypes) > 1:
            yield f"{name} would be made of tensors of several dtypes: {', '.join(dtypes)}"


def claimed_twice(name: str, one: str, other: str, *, has_two_versions: bool = False) -> str:
    """Return the sentence for two stored tensors that would both become the tensor `name` of a model."""
    text = f"{one} and {other} would both become {name}"
    return f"{text}: names of two versions are mixed" if has_two_versions else text


def unequal_experts(stored: Mapping[str, StoredTensor], used: Container[str]) -> Iterator[str]:
    """Yield a sentence for each tensor of an expert that has another shape than most, and of which nothing is made."""
    groups: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {}
    for name, tensor in stored.items():
        found = _EXPERT.fullmatch(name)
        if found:
            groups.setdefault((found[1], found[3]), {})[name] = tensor.torch_shape
    for shapes in groups.values():
        usual, _ = Counter(shapes.values()).most_common(1)[0]
        for name, shape in shapes.items():
            if shape != usual and name not in used:
                yield f"{name} is {list(shape)}, and {list(usual)} of other experts: all have to be of one shape"


def missing_experts(stored: Iterable[str], expected: Container[str], fitting: Container[str] = ()) -> Iterator[str]:
    """Yield a sentence for each tensor that some experts lack, where the model fuses them and would move the others up.

    Of the stored tensors `fitting` some of the model's shape are made: their last expert is the last that has one.
    """
    groups: dict[str, dict[str, set[int]]] = {}
    for name in stored:
        found = _EXPERT.fullmatch(name)
        if found and name not in expected:
            groups.setdefault(found[1], {}).setdefault(found[3], set()).add(int(found[2]))
    for prefix, tensors in groups.items():
        most = max(max(numbers) for numbers in tensors.values())
        for suffix, numbers in tensors.items():
            last = max(numbers)
            known = range((last if f"{prefix}.{last}.{suffix}" in fitting else most) + 1)
            missing = [number for number in known if number not in numbers]
            if missing:
                listed = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
                yield f"{prefix} has no {suffix} for {counted(len(missing), 'expert')}: {listed}"
