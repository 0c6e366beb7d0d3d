"""Find what someone means by a name: a module, a tensor, or the end of such a name that only one has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType

from bigload.errors import OptionError
from bigload.planning.choices import NameScheme
from bigload.planning.module_names import in_memory_names
from bigload.planning.planner import PlanDetails

_MAX_SHOWN = 100
_NUM_SUGGESTED = 5


def name_in_checkpoint(details: PlanDetails, asked: str) -> str:
    """Return the module or tensor of the checkpoint that `asked` names, also in the names of the device map."""
    modules = [node.name for node in details.structure.root.walk() if node.name]
    tensors, left_out = details.structure.checkpoint.tensors, details.structure.left_out
    homes, translated = details.plan.homes, _translated(details)
    return name_among([*homes, *modules, *tensors, *left_out], asked, translated, suggested=[*homes, *translated])


def name_among(
    names: Iterable[str], asked: str, translated: Mapping[str, str] = MappingProxyType({}), *, suggested: list[str]
) -> str:
    """Return the one of `names` that `asked` means.

    A whole name is taken as it is, one of `translated` as what that says, and the end of a name, such as `layers.37`,
    stands for the only one that ends so. Of `suggested`, an error lists those that are close.
    """
    name, known = asked.strip().strip("."), dict.fromkeys(names)
    if name in known:
        return name
    if name in translated:
        return translated[name]
    ending = [other for other in known if other.endswith(f".{name}")] if name else []
    if len(ending) == 1:
        return ending[0]
    if ending:
        raise OptionError(
            f"{name:.{_MAX_SHOWN}} is the end of {len(ending)} names",
            hint=f"say which one, for example {', '.join(ending[:_NUM_SUGGESTED])}",
        )
    close = _close(name, suggested)
    raise OptionError(
        f"no module or tensor is called {name:.{_MAX_SHOWN}}",
        hint=f"close to it are {', '.join(close)}" if close else "bigload inspect --depth 9 lists the modules",
    )


def _translated(details: PlanDetails) -> dict[str, str]:
    """Return the checkpoint's names by those that the device map speaks, where they are others."""
    if details.options.names is NameScheme.CHECKPOINT:
        return {}
    checkpoint = details.structure.checkpoint
    renaming = in_memory_names(tuple(details.plan.homes), checkpoint.tensors, checkpoint.config)
    return {name: key for key, names in reversed(tuple(renaming.keys.items())) for name in names}


def _close(name: str, keys: list[str]) -> list[str]:
    """Return keys like `name`, compared as a whole and by as many parts at the end as it has."""
    depth = name.count(".") + 1
    ends: dict[str, str] = {}
    for key in keys:
        ends.setdefault(key, key)
        ends.setdefault(".".join(key.split(".")[-depth:]), key)
    found = get_close_matches(name[:_MAX_SHOWN], ends, n=_NUM_SUGGESTED)
    holding = [key for key in keys if name and name in key]
    return list(dict.fromkeys([*(ends[end] for end in found), *holding]))[:_NUM_SUGGESTED]
