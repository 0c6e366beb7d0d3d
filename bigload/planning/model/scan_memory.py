"""Memory that one recurrent layer holds while it reads a chunk, as transformers 5 runs it without extra kernels.

The kernels of mamba-ssm and causal-conv1d, which transformers takes where they are installed, keep the states of a scan
in registers. Without them torch holds the states of a whole chunk in 32 bits: mamba those of every token, mamba 2 and
the gated delta rule the products within pieces of the chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigload.planning.model.block_shapes import RecurrentShapes
from bigload.planning.model.config import ModelConfig

_MAMBA2_PIECE = 256
_DELTA_RULE_PIECE = 64
"""Tokens that a scan multiplies at once, where the config does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanMemory:
    """One recurrent layer.

    Attributes:
        narrow: Elements per token in the dtype of the model.
        wide: Elements per token in 32 bits.
        piece: Tokens, up to a multiple of which a chunk is padded.
        is_scan: Whether states are held that a kernel would not store.
    """

    narrow: int
    wide: int
    piece: int
    is_scan: bool

    def num_bytes(self, tokens: int, width: int) -> int:
        """Return the bytes at the peak for `tokens` tokens; `width` is the bytes of a number."""
        padded = -(-tokens // self.piece) * self.piece
        return tokens * self.narrow * width + padded * self.wide * 4


def scan_memory(shapes: RecurrentShapes, state: int, config: ModelConfig) -> ScanMemory:
    """Return what a layer of these shapes holds; `state` is the elements of its recurrent state."""
    inner, channels, heads = shapes.inner_width or shapes.conv_channels, shapes.conv_channels, shapes.num_heads
    columns = state // inner if inner else 0
    if not heads:
        # The linear unit of recurrentgemma: branch, convolution, two gates, the decay with its logarithm and square,
        # the input with its normalised copies, states. A short convolution: three projections, the product of two of
        # them, its convolution, the product with the third, and that once more in another order.
        return ScanMemory(narrow=(12 if shapes.is_gated else 7) * inner, wide=0, piece=1, is_scan=False)
    if shapes.state_size is not None:
        # Projection to both branches, convolution and its contiguous copy, time steps, joined outputs. In 32 bits the
        # decay, its product with the input and one factor of that for each column of the state; the output twice.
        return ScanMemory(narrow=6 * inner, wide=inner * (3 * columns + 2), piece=1, is_scan=True)
    if shapes.has_keys:
        # Projections and the convolution. In 32 bits queries, keys, values, and their products with decay and beta;
        # products of the keys of a piece with one another.
        wide = 10 * inner + 3 * _DELTA_RULE_PIECE * heads
        return ScanMemory(narrow=2 * (channels + inner), wide=wide, piece=_DELTA_RULE_PIECE, is_scan=True)
    # Mamba 2: as above; B and C of every head, decayed; decay, product and both together within a piece. Then the
    # output, or a copy of the states that it is made of.
    piece = config.number("scan_piece") or _MAMBA2_PIECE
    wide = heads * 3 * (columns + piece) + max(7 * inner, 4 * inner + heads * columns)
    return ScanMemory(narrow=inner + 2 * channels, wide=wide, piece=piece, is_scan=True)
