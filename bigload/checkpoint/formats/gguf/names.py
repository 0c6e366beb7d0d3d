"""Names of tensors in GGUF files, and those that transformers has for them.

llama.cpp names tensors `blk.3.attn_q.weight` where transformers says `model.layers.3.self_attn.q_proj.weight`;
`families.py` has the names. The tensors of an architecture that is not there keep theirs.

Experts lie in one tensor; each is a byte range of it, and listed by itself here, as in files of transformers. Where a
class has one tensor for several of GGUF, each is a parameter of its module (`mlp.experts.ffn_up_exps_weight`); they are
joined where values are decoded (`layouts/transforms/gguf_values.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from bigload.checkpoint.formats.gguf.families import Family, GgufRule
from bigload.checkpoint.model import Span, TensorInfo

_BLOCK = re.compile(r"((?:enc\.|dec\.)?blk)\.(\d+)\.(.+)")
MAX_EXPERTS = 4096


def renamed(family: Family, tensors: Iterable[TensorInfo]) -> Iterator[TensorInfo]:
    """Yield `tensors` under transformers' names, each expert by itself; those without one keep theirs."""
    known = list(family.block.values())
    shared = {each for each in known if known.count(each) > 1}
    tensors = list(tensors)
    is_gated = any(tensor.name.endswith(".ffn_gate.weight") for tensor in tensors)
    for tensor in tensors:
        found = _BLOCK.fullmatch(tensor.name)
        if found is None:
            module, _, leaf = tensor.name.rpartition(".")
            yield replace(tensor, name=f"{family.root[module]}.{leaf}") if module in family.root else tensor
            continue
        stack, layer, stored = found.groups()
        layers, block = family.stacks.get(stack, ("", {}))
        before = f"{layers}.{layer}."
        module, _, leaf = stored.rpartition(".")
        part = module.removeprefix("ffn_").removesuffix("_exps")
        # T5 has another name where there is a gate
        name = None if is_gated and leaf == "weight" and module in block else block.get(stored)
        if name is None and module in block and leaf in ("weight", "bias"):
            name = f"{block[module]}.{leaf}"
        is_stack = len(tensor.shape) == 3 and tensor.num_bytes and tensor.shape[0] <= MAX_EXPERTS
        if name is not None:
            if name in shared and stored in block:
                name = _part_name(name, stored)
            shape = tensor.shape
            if module == "ffn_gate_inp_shexp" and len(shape) == 1:  # llama.cpp keeps it as a vector
                shape = (1, *shape)
            elif family.rules.get(name) is GgufRule.SQUEEZED and len(shape) in (1, 2):
                shape = (*shape[:-1], 1, shape[-1])
            yield replace(tensor, name=before + name, shape=shape)
        elif module == f"ffn_{part}_exps" and part in family.expert_parts and is_stack:
            for number in range(tensor.shape[0]):
                name = family.experts.format(number=number, part=family.expert_parts[part])
                yield _expert(tensor, f"{before}{name}.{leaf}", number)
        else:
            yield tensor


def _part_name(name: str, stored: str) -> str:
    """Return a name for a part of what transformers calls `name`: another parameter of the same module."""
    return f"{name.rpartition('.')[0]}.{stored.replace('.', '_')}"


def _expert(tensor: TensorInfo, name: str, number: int) -> TensorInfo:
    span, num_bytes = tensor.span, tensor.num_bytes // tensor.shape[0]
    start = span.start + number * num_bytes
    return TensorInfo(name, tensor.dtype, tensor.shape[1:], Span(span.file, start, start + num_bytes))


def gguf_names(family: Family, name: str) -> tuple[str, ...]:
    """Return the name in GGUF of what transformers calls `name`, or of its stack of experts; several if it is cut."""
    module, _, leaf = name.rpartition(".")
    for stored, known in family.root.items():
        if module == known:
            return (f"{stored}.{leaf}",)
    place = place_of(family, name)
    if place is None:
        return ()
    stack, layer, rest = place
    block = family.stacks[stack][1]
    module, _, leaf = rest.rpartition(".")
    several = [stored for stored, known in block.items() if known == rest]
    if not several and leaf in ("weight", "bias"):
        several = [f"{stored}.{leaf}" for stored, known in block.items() if known == module]
        before, _, after = family.experts.partition("{number}")
        several += [
            f"ffn_{stored}_exps.{leaf}"
            for stored, part in family.expert_parts.items()
            if re.fullmatch(rf"{re.escape(before)}\d+{re.escape(after.format(part=part))}", module)
        ]
    return tuple(f"{stack}.{layer}.{stored}" for stored in several)


def place_of(family: Family, name: str) -> tuple[str, int, str] | None:
    """Return the stack of blocks, the number and the name in the block of what transformers calls `name`."""
    for stack, (layers, _) in family.stacks.items():
        number, _, rest = name.removeprefix(f"{layers}.").partition(".")
        if name.startswith(f"{layers}.") and number.isdecimal() and len(number) < 10 and rest:
            return stack, int(number), rest
    return None


def rule_of(family: Family, name: str) -> GgufRule | None:
    """Return what happens to the values of what transformers calls `name`."""
    rest = (place_of(family, name) or ("", 0, ""))[2]
    return family.rules.get(rest) or family.rules.get(rest.rpartition(".")[0])


def joined(family: Family, tensors: Mapping[str, TensorInfo]) -> dict[str, list[TensorInfo]]:
    """Return the `tensors` of a file, as `renamed` names them, by the name that transformers has for all of each.

    Raises:
        ValueError: some of those that are one are missing, or differ in form.
    """
    known = list(family.block.values())
    shared = {f".{_part_name(each, stored)}": each for stored, each in family.block.items() if known.count(each) > 1}
    found: dict[str, dict[int, TensorInfo]] = {}
    needed: dict[str, int] = {}
    for name, tensor in tensors.items():
        number, ending = next((pair for pair in enumerate(shared) if name.endswith(pair[1])), (0, ""))
        whole = f"{name.removesuffix(ending)}.{shared[ending]}" if ending else name
        found.setdefault(whole, {})[number] = tensor
        needed[whole] = known.count(shared[ending]) if ending else 1
    for name, parts in found.items():
        if len(parts) < needed[name] or len({(part.dtype, len(part.shape)) for part in parts.values()}) > 1:
            listed = " and ".join(part.name for part in parts.values())
            raise ValueError(f"{name} needs {needed[name]} tensors of one form, found {listed}")
    return {name: [parts[number] for number in sorted(parts)] for name, parts in found.items()}
