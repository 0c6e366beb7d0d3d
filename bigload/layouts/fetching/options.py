"""Options of a fetch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bigload.devices import Device
from bigload.errors import OptionError
from bigload.planning.plan import Plan
from bigload.units import MIB

DEFAULT_MAX_INFLIGHT = 128 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """Options of `bigload.fetch`, which describes them."""

    only: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    plan: Plan | str | Path | None = None
    devices: tuple[str, ...] = ()
    rank: int | None = None
    tp: int | None = None
    tp_rules: Mapping[str, str] | str | Path | None = None
    force: bool = False
    threads: int | None = None
    max_inflight: int = DEFAULT_MAX_INFLIGHT

    def __post_init__(self) -> None:
        chosen = {"only": self.only or None, "plan": self.plan, "rank": self.rank}
        names = [name for name, value in chosen.items() if value is not None]
        if len(names) > 1:
            raise OptionError.of(names[1], chosen[names[1]], f"nothing beside {names[0]}: one of only, plan and rank")
        for name, other in (("plan", "device"), ("device", "plan"), ("rank", "tp"), ("tp", "rank"), ("tp_rules", "tp")):
            values = {"device": self.devices or None}
            value, needed = (values.get(key, getattr(self, key, None)) for key in (name, other))
            if value is not None and needed is None:
                raise OptionError.of(other, None, f"a value, which {name} goes with")
        if self.rank is not None and self.tp is not None and not 0 <= self.rank < self.tp:
            raise OptionError.of("rank", self.rank, f"0 to {self.tp - 1}, of {self.tp} ranks")
        try:
            tuple(map(Device.parse, self.devices))
        except ValueError as error:
            raise OptionError.of("device", list(self.devices), f"devices of the plan ({error})") from None

    @property
    def described(self) -> dict[str, object]:
        """The options that choose what is fetched, as plain JSON values."""
        found: dict[str, object] = {
            name: list(value)
            for name, value in (
                ("only", self.only),
                ("device", self.devices),
                ("include", self.include),
                ("exclude", self.exclude),
            )
            if value
        }
        return found | {name: value for name, value in (("rank", self.rank), ("tp", self.tp)) if value is not None}
