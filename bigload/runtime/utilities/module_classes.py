"""Classes of a model's modules by name."""

from __future__ import annotations

from torch import nn


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class called `name` of `module` or of one inside, the outermost first; `None` if there is none."""
    return next((type(each) for each in module.modules() if type(each).__name__ == name), None)
