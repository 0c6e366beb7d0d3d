"""The words that a plan's options know, apart from their code: the command line's help needs no more."""

from __future__ import annotations

from enum import StrEnum


class Policy(StrEnum):
    """A way to place units on devices."""

    OPTIMAL = "optimal"
    """The least time per token, then the fewest device changes, then the emptiest fullest accelerator."""
    SEQUENTIAL = "sequential"
    """Fill the devices one after the other, in execution order."""
    BALANCED = "balanced"
    """Keep the fullest accelerator as empty as possible."""
    BALANCED_LOW_0 = "balanced_low_0"
    """Keep the first accelerator as empty as possible, then the fullest of the others."""
    STREAMED = "streamed"
    """Keep no weights on accelerators: each unit is brought when it runs, as in diffusers' offloading."""


class Balance(StrEnum):
    """Sharing among accelerators that hold everything, when several ways cost the same."""

    SPREAD = "spread"
    """The fullest one, by its share of its limit, is as empty as possible."""
    FILL = "fill"
    """The first ones are full."""


class Order(StrEnum):
    """In which order accelerators are used."""

    KEEP = "keep"
    """As the budget names them."""
    ANY = "any"
    """As it costs least; the device map may then begin on any of them."""


class Experts(StrEnum):
    """Placement of the blocks of a mixture of experts."""

    AUTO = "auto"
    """Apart from the rest of their block when that streams fewer bytes per token."""
    BLOCK = "block"
    """With their block."""
    SPLIT = "split"
    """Apart: attention, router and shared experts on the accelerator, routed experts where there is room."""


class Attention(StrEnum):
    """Kernel of attention, which decides the memory it takes while it runs."""

    EAGER = "eager"
    """By separate operations, which store a score for every head, query and key."""
    SDPA = "sdpa"
    """By a fused kernel, which stores none: torch's `scaled_dot_product_attention`, flash attention."""


class NameScheme(StrEnum):
    """Naming of a device map's modules."""

    CHECKPOINT = "checkpoint"
    """Those of the tensors in the files, which resharding and loading go by."""
    TRANSFORMERS = "transformers"
    """Those of the modules that transformers 5 builds, which `from_pretrained(device_map=...)` goes by."""
