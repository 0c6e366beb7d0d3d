import pytest
import torch
from torch import nn

from bigload.parallel.tensor_parallel.layer_kinds import LayerKind, layer_kind
from parallel_models import InputsFirst, ScaledEmbedding


class Reversed(nn.Linear):
    def forward(self, x):
        return x @ self.weight.T + (0 if self.bias is None else self.bias)


class Squared(nn.Linear):
    def forward(self, x):
        return super().forward(x) ** 2


class Positions(nn.Embedding):
    def forward(self, mask):
        return super().forward(mask.cumsum(-1))


class Routed(nn.Linear):
    def forward(self, x):
        return super().forward(x), None


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: nn.Linear(3, 5), LayerKind.LINEAR),
        (lambda: nn.Linear(4, 4, bias=False), LayerKind.LINEAR),
        (lambda: Reversed(6, 6), LayerKind.LINEAR),
        (lambda: InputsFirst(6, 6), LayerKind.TRANSPOSED),
        (lambda: InputsFirst(7, 2), LayerKind.TRANSPOSED),
        (lambda: nn.Embedding(9, 4, padding_idx=8), LayerKind.LOOKUP),
        (lambda: ScaledEmbedding(9, 4), LayerKind.LOOKUP),
    ],
)
def test_a_layer_is_known_by_what_it_does(make, kind, device):
    with torch.device(device):
        assert layer_kind(make()) is kind


@pytest.mark.parametrize(
    "module",
    [
        Squared(4, 4),
        Positions(9, 4),
        Routed(4, 4),
        nn.Embedding(9, 4, max_norm=1.0),
        nn.LayerNorm(4),
        nn.Conv1d(4, 4, 1),
        nn.Bilinear(4, 4, 4),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 4)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_does_something_else_is_no_layer(module):
    assert layer_kind(module) is None


def test_a_layer_that_is_looked_at_stays_as_it_is():
    layer = InputsFirst(6, 6)
    before = dict(vars(layer))
    layer_kind(layer)
    assert dict(vars(layer)) == before
