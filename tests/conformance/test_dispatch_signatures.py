"""Arguments of the big-model functions: the names, the order and the defaults of accelerate's."""

from inspect import signature

import pytest

import bigload

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

pytestmark = pytest.mark.peers


@pytest.mark.parametrize(
    "name",
    ["cpu_offload", "cpu_offload_with_hook", "disk_offload", "dispatch_model", "load_checkpoint_and_dispatch"],
)
def test_arguments_are_those_of_accelerate(name):
    ours, theirs = (signature(getattr(module, name)).parameters.values() for module in (bigload, accelerate))
    assert [(each.name, each.default, each.kind) for each in ours] == [
        (each.name, each.default, each.kind) for each in theirs
    ]
