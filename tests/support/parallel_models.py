"""Small models of plain torch that ranks divide, built in the ways in which models are."""

import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS, ROWS = 24, 4, 51


class InputsFirst(nn.Module):
    """A layer that stores its weight inputs first, as the Conv1D of GPT-2 does."""

    def __init__(self, num_outputs, num_inputs):
        super().__init__()
        self.nf = num_outputs
        self.weight = nn.Parameter(torch.randn(num_inputs, num_outputs) / 4)
        self.bias = nn.Parameter(torch.randn(num_outputs) / 4)

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 3.0


class Attention(nn.Module):
    """Queries, keys and values apart; `num_key_heads` of them."""

    def __init__(self, num_heads=HEADS, num_key_heads=HEADS, width=WIDTH):
        super().__init__()
        self.num_heads, self.num_key_heads, self.head_dim = num_heads, num_key_heads, width // num_heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, num_key_heads * self.head_dim)
        self.v = nn.Linear(width, num_key_heads * self.head_dim)
        self.out = nn.Linear(width, width)

    def forward(self, x, bias=None):
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        k, v = (
            layer(x)
            .view(batch, length, self.num_key_heads, self.head_dim)
            .transpose(1, 2)
            .repeat_interleave(self.num_heads // self.num_key_heads, 1)
            for layer in (self.k, self.v)
        )
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class FusedAttention(nn.Module):
    """Queries, keys and values in one, stored inputs first; the width is remembered to split them."""

    def __init__(self):
        super().__init__()
        self.split_size, self.head_dim = WIDTH, WIDTH // HEADS
        self.qkv = InputsFirst(3 * WIDTH, WIDTH)
        self.out = InputsFirst(WIDTH, WIDTH)

    def forward(self, x, bias=None):
        parts = self.qkv(x).split(self.split_size, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(y.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """Gate and up in one; a scale for each channel between them and the way down."""

    def __init__(self):
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.scale = nn.Parameter(torch.rand(2 * WIDTH))
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(functional.relu(gate) * up * self.scale)


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm, self.attention, self.feed = nn.LayerNorm(WIDTH), attention, Gated()

    def forward(self, x, bias=None):
        x = x + self.attention(self.norm(x), bias)
        return x + self.feed(self.norm(x))


class Model(nn.Module):
    """Tokens to logits; the head is tied to the table, and a bias by heads is made outside of the blocks."""

    def __init__(self, make=Attention, *, tied=True, has_head_bias=False, num_blocks=2):
        super().__init__()
        self.table = ScaledEmbedding(ROWS, WIDTH)
        self.blocks = nn.ModuleList(Block(make()) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.has_head_bias = has_head_bias
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        bias = torch.arange(1.0, HEADS + 1).view(1, HEADS, 1, 1) * torch.arange(ids.shape[1]) / 9
        for block in self.blocks:
            x = block(x, bias if self.has_head_bias else None)
        return self.head(x)


class Peeking(Model):
    """Its head is the table's weight, read past the table."""

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return functional.linear(x, self.table.weight)


class Chosen(nn.Module):
    """Experts stored as one parameter, of which the first is always chosen."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 2 * WIDTH, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(2, WIDTH, 2 * WIDTH) / 4)

    def forward(self, x):
        return functional.linear(functional.relu(functional.linear(x, self.up[0])), self.down[0])


class Convolved(nn.Module):
    """A convolution between two layers that is never called: the module around calls a kernel with its weight."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.mix = nn.Conv1d(2 * WIDTH, 2 * WIDTH, 3, groups=2 * WIDTH, padding=1, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, bias=None):
        kernel = self.mix.weight
        mixed = functional.conv1d(self.up(x).transpose(1, 2), kernel, padding=1, groups=len(kernel))
        return self.down(mixed.transpose(1, 2))


class Routed(nn.Module):
    """Experts that are layers of their own, of which only the second is ever chosen."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3)
        )

    def forward(self, x, bias=None):
        return self.experts[1](x)


def shared_keys():
    return Attention(num_key_heads=1)


def two_key_heads():
    return Attention(num_key_heads=2)


def three_heads():
    return Attention(num_heads=3, num_key_heads=3)


def made(make=Attention, kind=Model, **options):
    torch.manual_seed(0)
    return kind(make, **options).eval()


def example():
    return {"ids": torch.arange(10).reshape(2, 5)}


MODELS = {
    "heads": made,
    "fused": lambda: made(FusedAttention),
    "shared keys": lambda: made(shared_keys),
    "two key heads": lambda: made(two_key_heads),
    "three heads": lambda: made(three_heads),
    "head bias": lambda: made(has_head_bias=True),
    "untied": lambda: made(tied=False),
    "peeking": lambda: made(kind=Peeking),
    "convolved": lambda: made(Convolved),
}
