"""Arguments of the big-model functions: the names, the order and the defaults of accelerate's."""

from inspect import Parameter, signature

import pytest

import bigload

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

pytestmark = pytest.mark.peers


@pytest.mark.parametrize(
    "name",
    ["cpu_offload", "cpu_offload_with_hook", "disk_offload", "dispatch_model", "load_checkpoint_and_dispatch"],
)
def test_arguments_are_those_of_accelerate_and_bigloads_own_by_name_alone(name):
    ours, theirs = (list(signature(getattr(module, name)).parameters.values()) for module in (bigload, accelerate))
    own = [each for each in ours if each.kind is Parameter.KEYWORD_ONLY]
    assert [(each.name, each.default, each.kind) for each in ours if each not in own] == [
        (each.name, each.default, each.kind) for each in theirs
    ]
    assert {each.name for each in own} <= {"prefetch", "prefetch_bytes", "resident_bytes", "experts_on_demand"}
