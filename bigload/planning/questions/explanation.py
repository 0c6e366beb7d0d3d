"""Answer to why a module is where it is, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bigload.devices import Device
from bigload.planning.plan import PlanNote
from bigload.units import format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShare:
    """Part of the modules asked about on one device: bytes of weights, and of what they need where they run."""

    device: Device
    runs_on: Device
    num_bytes: int
    cache_bytes: int
    logits_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdjacentModule:
    """The module that runs just before, or just after."""

    name: str
    device: Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The same plan with a module elsewhere.

    Attributes:
        module: What was moved; what has to go with it went along.
        keeps_limits: Whether every device then keeps its limit, and experts run where their block does.
        lacking_bytes: What devices lack, by device; empty when limits are kept.
        more_seconds: That a token would take longer, less than 0 for shorter.
        more_device_changes: That a forward pass would make, less than 0 for fewer.
    """

    module: str
    device: Device
    keeps_limits: bool
    lacking_bytes: Mapping[Device, int]
    more_seconds: float
    more_device_changes: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Reasons for the place of a module or tensor.

    Attributes:
        name: Its name in the checkpoint.
        modules: The keys of the device map, in the names of the checkpoint, that it is, covers, or is a part of.
        homes: Where it is; none for a module that is left out.
        before: What runs just before it, `None` at the beginning.
        after: What runs just after it, `None` at the end.
        reasons: What the bytes say.
        alternatives: What trials say, in the order of the budget; none where it covers many modules.
    """

    name: str
    modules: tuple[str, ...]
    homes: tuple[DeviceShare, ...]
    before: AdjacentModule | None
    after: AdjacentModule | None
    reasons: tuple[PlanNote, ...]
    alternatives: tuple[Alternative, ...]

    @property
    def headline(self) -> str:
        """Return where it is, in a sentence."""
        if not self.homes:
            return f"{self.name} is on no device"
        places = []
        for home in self.homes:
            beside = {"cache": home.cache_bytes, "logits": home.logits_bytes}
            sizes = [f"{format_size(home.num_bytes)} of weights"]
            sizes += [f"{format_size(size)} of {what}" for what, size in beside.items() if size]
            runs = "" if home.runs_on == home.device else f" and runs on {home.runs_on}"
            places.append(f"on {home.device}{runs} ({', '.join(sizes)})")
        around = [
            f"{word} {near.name} on {near.device}"
            for word, near in (("after", self.before), ("before", self.after))
            if near is not None
        ]
        return f"{self.name} is {', '.join(places)}{', ' if around else ''}{' and '.join(around)}"
