"""Names of modules and tensors in a model, with dots between their parts."""

from __future__ import annotations

from collections.abc import Iterator


def prefixes(name: str) -> Iterator[str]:
    """Yield the names of all modules around a tensor or module, from the root on, and its own name last.

    >>> list(prefixes("layers.0.weight"))
    ['', 'layers', 'layers.0', 'layers.0.weight']
    """
    yield ""
    stop = name.find(".")
    while stop != -1:
        yield name[:stop]
        stop = name.find(".", stop + 1)
    yield name


def joined(module_name: str, name: str) -> str:
    """Return the name in the model of what a module calls `name`."""
    return f"{module_name}.{name}" if module_name else name
