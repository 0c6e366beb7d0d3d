"""Prediction: the seconds that a plan takes on a machine to load, to the first token, and for each further one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, NamedTuple, TypeVar

from bigload.devices import CPU, DISK
from bigload.dtypes import DTYPES, DType
from bigload.errors import OptionError
from bigload.machine.profiles.machine_profile import (
    LAUNCHED_MATRICES,
    NARROW_ROW,
    WIDE_ROW,
    DeviceProfile,
    MachineProfile,
)
from bigload.planning.model.structure import ModelStructure
from bigload.planning.plan import Plan, duration
from bigload.planning.timing.pipeline import Step, Work, simulate
from bigload.planning.timing.residency import READ_BY_ONE_THREAD_BELOW_BYTES, Source, SteadyState, steady_state
from bigload.planning.timing.schedule import BlockSchedule, TimedBlock, Visit, num_expert_tensors, schedule_of
from bigload.units import counted

PROMPT_TOKENS = 512
"""Of the prompt that the first token is predicted for, where the context is not shorter."""

_STREAMED_EXPERT = 2
"""Times as many small operations: an expert that is brought by itself computes by itself, with a hook, on its tokens,
where the others of a layer are products of one kernel."""

_NUM_TOKENS = 4
"""Tokens that are simulated when weights are streamed: the pipeline is steady after one or two."""

_SHORTEST_SECONDS = 1e-9
"""Of a token of a model without weights."""

_WHOLE = 10
"""Tokens per second from which on digits after the point say nothing."""

_LEAST_NARROW_SHARE = 0.5
"""Of the rate of wide matrices: narrow ones are taken to have no lower one, which could only come of noise."""

Bound = Literal["compute", "memory", "link", "disk"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Times of one plan on one machine.

    Attributes:
        load_seconds: Until the model is ready, its files not cached; without the import of libraries.
        first_token_seconds: From the prompt to the first token, streamed files not cached.
        token_seconds: Of each further token, once everything that stays is there.
        prompt_tokens: Length of that prompt, of each sequence.
        batch: Sequences that are run together; each gets a token in `token_seconds`.
        bound_by: What is busy longest for a further token: computing, the memory of the device that computes, the
            link to it, or the disk.
        steps: What every lane does for one further token.
    """

    load_seconds: float
    first_token_seconds: float
    token_seconds: float
    prompt_tokens: int
    batch: int
    bound_by: Bound
    profile_name: str
    source: Literal["measured", "table", "file"]
    steps: tuple[Step, ...]

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all sequences together."""
        return self.batch / max(self.token_seconds, _SHORTEST_SECONDS)

    def document(self) -> dict[str, object]:
        """Return it as plain JSON values."""
        steps = [step._asdict() for step in self.steps]
        return {**asdict(self), "tokens_per_second": self.tokens_per_second, "steps": steps}

    def __str__(self) -> str:
        """Return the sentence that `bigload plan` prints."""
        rate = f"{self.tokens_per_second:.2g}" if self.tokens_per_second < _WHOLE else f"{self.tokens_per_second:.0f}"
        of = f" of {counted(self.batch, 'sequence')}" if self.batch > 1 else ""
        origin = "measured here" if self.source == "measured" else f"profile {self.profile_name}"
        return (
            f"About {rate} tokens/s{of}, {self.bound_by}-bound; first token of {self.prompt_tokens} after "
            f"{duration(self.first_token_seconds)}; loads in {duration(self.load_seconds)} ({origin})."
        )


def predict(
    plan: Plan,
    structure: ModelStructure,
    profile: MachineProfile,
    *,
    prompt_tokens: int | None = None,
    ram_bytes: int | None = None,
) -> Prediction:
    """Return the times of `plan`, of a model with `structure`, on the machine of `profile`.

    The prompt has `prompt_tokens`; by default `PROMPT_TOKENS`, or the plan's context where that is shorter. `ram_bytes`
    are free before the model is loaded: what of them is left keeps pages of streamed files. By default they are those
    of the profile, and without that the plan's limit of RAM.
    """
    workload = plan.options.workload
    if prompt_tokens is None:
        prompt_tokens = min(PROMPT_TOKENS, workload.context or PROMPT_TOKENS)
    schedule = schedule_of(plan, structure)
    rates = _Rates(plan, schedule, profile)
    if ram_bytes is None:
        ram_bytes = profile.ram_bytes or next((use.budget_bytes for use in plan.devices if use.device == CPU), None)
    free = None if ram_bytes is None else max(ram_bytes - plan.weights_on(CPU), 0)
    stays = steady_state(schedule, free)
    length = prompt_tokens if workload.context else 0
    in_decoder = 1 if schedule.is_encoder_decoder else prompt_tokens
    cold = stays.before_a_pass()
    first = [
        rates.work(visit, cold, prompt_tokens if schedule.blocks[visit.block].is_encoder else in_decoder, length)
        for visit in schedule.visits
    ]
    token = [rates.work(visit, stays, 1, length) for visit in schedule.token_visits]
    num_tokens = _NUM_TOKENS if any(work.fetch or work.routed_fetch for work in token) else 1
    ended: list[float] = []
    steps: list[Step] = []
    for end, begun in simulate([*first, *token * num_tokens], schedule.window_bytes):
        ended.append(end)
        steps += begun
    ends = ended[len(first) - 1 :: len(token)] if first and token else [0.0, 0.0]
    busy = rates.busy(schedule.token_visits, token, length)
    return Prediction(
        load_seconds=rates.load_seconds(structure),
        first_token_seconds=ends[0],
        token_seconds=ends[-1] - ends[-2],
        prompt_tokens=prompt_tokens,
        batch=workload.batch,
        bound_by=_bound(busy),
        profile_name=profile.name,
        source=profile.source,
        steps=tuple(_between(steps, ends[-2], ends[-1])),
    )


def with_bandwidth(profile: MachineProfile, *, disk: int | None = None, link: int | None = None) -> MachineProfile:
    """Return `profile` with other bytes per second from the disk, or from RAM to accelerators."""
    if disk is not None:
        profile = replace(profile, disk_rate=disk, mapped_rate=None, cold_load_rate=None, single_read_rate=None)
    if link is not None:
        devices = (device if device.link_in is None else replace(device, link_in=link) for device in profile.devices)
        profile = replace(profile, devices=tuple(devices))
    return profile


def cold_load_rate(profile: MachineProfile) -> int:
    """Return the bytes per second of a load of files that are not cached."""
    return profile.cold_load_rate or min(profile.disk_rate, profile.load_rate)


def matching_seconds(profile: MachineProfile, structure: ModelStructure) -> float:
    """Return the seconds of matching the tensors of a model with those of its files."""
    num_joined = num_expert_tensors(structure)
    num_others = len(structure.checkpoint.tensors) - num_joined
    return profile.matching_seconds + num_others * profile.tensor_seconds + num_joined * profile.expert_tensor_seconds


def _touching(profile: MachineProfile, num_bytes: float) -> float:
    """Return the seconds that first touches of so many bytes of RAM take, where a host has taken them back."""
    return num_bytes / profile.fresh_memory_rate if profile.fresh_memory_rate else 0.0


def rate_for(dtype: DType, rates: Mapping[str, int]) -> int | None:
    """Return the rate for `dtype`, or for the one that computes in its place; `None` if neither is known."""
    name = _computed_as(dtype, rates)
    return None if name is None else rates[name]


def _computed_as(dtype: DType, rates: Mapping[str, int]) -> str | None:
    return next((name for name in (dtype.name, "BF16", "F16", "F32") if name in rates), None)


class MatrixRate(NamedTuple):
    """Rate of the matrices of a product with one token: bytes per second, and seconds of each row beside its bytes."""

    byte_rate: float
    row_seconds: float


def matrix_rate_for(dtype: DType, device: DeviceProfile) -> MatrixRate | None:
    """Return the rate of matrices for `dtype`, or for the one that computes in its place; `None` if neither is known.

    Seconds per byte are linear in 1 / length of a row, through both rates that are known of a CPU.
    """
    name = _computed_as(dtype, device.weight_rate)
    if name is None:
        return None
    wide = device.weight_rate[name]
    narrow = min(max(device.narrow_weight_rate.get(name, wide), _LEAST_NARROW_SHARE * wide), wide)
    narrow_bytes, wide_bytes = (length * DTYPES[name].bits / 8 for length in (NARROW_ROW, WIDE_ROW))
    row_seconds = (1 / narrow - 1 / wide) / (1 / narrow_bytes - 1 / wide_bytes)
    return MatrixRate(wide / (1 - wide * row_seconds / wide_bytes), row_seconds)


def lacks(plan: Plan, profile: MachineProfile) -> str | None:
    """Return the first device that `plan` computes on and `profile` does not know."""
    used = (use.device for use in plan.devices if use.modules and use.device.is_accelerator)
    devices = dict.fromkeys([*used, plan.execution_device])
    return next((str(device) for device in devices if profile.device(device) is None), None)


def _bound(busy: Mapping[Bound, float]) -> Bound:
    """Return what is busy longest; computing and memory take turns on one device, so they count together."""
    device = busy["compute"] + busy["memory"]
    if max(busy["link"], busy["disk"]) > device:
        return "link" if busy["link"] > busy["disk"] else "disk"
    return "compute" if busy["compute"] > busy["memory"] else "memory"


def _between(steps: Sequence[Step], begin: float, end: float) -> Iterator[Step]:
    """Yield the parts of `steps` between two times, which are counted from the first."""
    for step in steps:
        start, stop = max(step.start_seconds, begin), min(step.start_seconds + step.seconds, end)
        if stop > start:
            yield Step(step.lane, step.name, start - begin, stop - start)


class _Rates:
    """Seconds of blocks on one machine."""

    def __init__(self, plan: Plan, schedule: BlockSchedule, profile: MachineProfile) -> None:
        missing = lacks(plan, profile)
        if missing is not None:
            known = ", ".join(device.device for device in profile.devices) or "none"
            raise OptionError(f"the profile {profile.name} has no device {missing}", hint=f"it has {known}")
        self._plan = plan
        self._schedule = schedule
        self._profile = profile
        self._batch = plan.options.workload.batch
        self._elements_per_byte = 8 / schedule.dtype.bits
        self._fetched = frozenset(schedule.fetched)
        resident = plan.resident_experts
        self._missed = 1.0 if resident is None else 1 - resident.num_uses / (resident.num_recorded or 1)

    def load_seconds(self, structure: ModelStructure) -> float:
        """Return the seconds of matching the tensors, and of reading what is loaded from cold files."""
        resident = self._plan.resident_experts
        to_device = {use.device: use.weights_bytes for use in self._plan.devices if use.device != DISK}
        if resident is not None:
            to_device[self._plan.execution_device] += resident.num_bytes
        stored = sum(to_device.values()) * self._schedule.stored_share
        links = (
            num_bytes / link
            for device, num_bytes in to_device.items()
            if num_bytes and (known := self._profile.device(device)) is not None and (link := known.link_in)
        )
        touching = _touching(self._profile, to_device.get(CPU, 0))
        reading = max([stored / cold_load_rate(self._profile), *links])
        return matching_seconds(self._profile, structure) + touching + reading

    def work(self, visit: Visit, stays: SteadyState, tokens: int, length: int) -> Work:
        """Return one run of a block over `tokens` tokens of each sequence, the last of `length`."""
        block = self._schedule.blocks[visit.block]
        source = stays.sources[visit.block]
        fetched = visit.block in self._fetched and source is not Source.DEVICE
        fetched = fetched and not (visit.is_lookup and stays.is_in_place)
        routed = block.routed_share(tokens * self._batch)
        chosen_bytes = block.routed_bytes * routed
        missed = chosen_bytes * self._missed * stays.missed_share
        routed_seconds = sum(self._routed(block, tokens).values())
        return Work(
            name=block.name,
            device=str(block.runs_on),
            seconds=sum(self._dense(visit, tokens, length, is_first=stays.is_first).values()),
            routed_seconds=routed_seconds,
            last_routed_seconds=routed_seconds * min(block.expert_bytes / chosen_bytes, 1) if chosen_bytes else 0.0,
            fetch=self._fetch(block, block.dense_bytes, source, stays, in_place=stays.is_in_place) if fetched else (),
            fetch_bytes=block.dense_bytes if fetched else 0,
            routed_fetch=self._fetch_experts(block, missed, stays) if block.streams_experts and missed else (),
        )

    def busy(self, visits: Sequence[Visit], works: Sequence[Work], length: int) -> dict[Bound, float]:
        """Return how long a token keeps each part of the machine busy; lanes of copies inside RAM count as memory."""
        found: dict[Bound, float] = dict.fromkeys(("compute", "memory", "link", "disk"), 0.0)
        lanes: dict[str, Bound] = {"disk": "disk", "link": "link", "ram": "memory"}
        for visit, work in zip(visits, works, strict=True):
            for part in (self._dense(visit, 1, length), self._routed(self._schedule.blocks[visit.block], 1)):
                for kind, seconds in part.items():
                    found[kind] += seconds
            for lane, seconds in (*work.fetch, *work.routed_fetch):
                found[lanes[lane]] += seconds
        return found

    def _dense(self, visit: Visit, tokens: int, length: int, *, is_first: bool = False) -> dict[Bound, float]:
        """Return the seconds of what every token needs, or the first one, by what they wait for."""
        if visit.is_lookup:
            return {}
        block = self._schedule.blocks[visit.block]
        device = self._device(block)
        together = self._batch * (1 if visit.is_head else tokens)
        num_bytes = block.dense_bytes - (0 if is_first else block.once_bytes)
        num_rows = block.dense_rows - (0 if is_first else block.once_rows)
        num_matrices = block.num_matrices - (0 if is_first else block.num_once_matrices)
        flops = 2.0 * together * num_bytes * self._elements_per_byte
        if block.num_layers:  # queries by keys and scores by values; of a prompt, half of them are behind the mask
            keys = tokens / 2 if tokens > 1 else length
            flops += 4.0 * together * keys * self._schedule.attention_width
        context = self._plan.options.workload.context
        cached = block.cache_bytes * length / context if context else 0.0
        seconds = self._seconds(device, num_bytes + cached, num_rows, flops)
        launched = device.launch_seconds * num_matrices / LAUNCHED_MATRICES
        return {**seconds, "compute": seconds.get("compute", 0.0) + launched}

    def _routed(self, block: TimedBlock, tokens: int) -> dict[Bound, float]:
        if not block.routed_bytes:
            return {}
        together = tokens * self._batch
        flops = 2.0 * together * block.routed_bytes * block.active_share * self._elements_per_byte
        device, share = self._device(block), block.routed_share(together)
        seconds = self._seconds(device, block.routed_bytes * share, block.routed_rows * share, flops)
        if not (device.link_in is None or block.streams_experts):  # a kernel for all experts at once
            return seconds
        num_matrices = block.num_routed_matrices * share * (_STREAMED_EXPERT if block.streams_experts else 1)
        launched = device.launch_seconds * num_matrices / LAUNCHED_MATRICES
        return {**seconds, "compute": seconds.get("compute", 0.0) + launched}

    def _seconds(self, device: DeviceProfile, num_bytes: float, num_rows: float, flops: float) -> dict[Bound, float]:
        matrices = self._known(matrix_rate_for(self._schedule.dtype, device), device)
        memory = num_bytes / matrices.byte_rate + num_rows * matrices.row_seconds
        compute = flops / self._known(rate_for(self._schedule.dtype, device.flops), device)
        return {"memory": memory} if memory >= compute else {"compute": compute}

    def _known(self, found: T | None, device: DeviceProfile) -> T:
        if found is None:
            raise OptionError(f"the profile {self._profile.name} says nothing about products on {device.device}")
        return found

    def _device(self, block: TimedBlock) -> DeviceProfile:
        found = self._profile.device(block.runs_on)
        assert found is not None, "that was checked"
        return found

    def _fetch_experts(self, block: TimedBlock, num_bytes: float, stays: SteadyState) -> tuple[tuple[str, float], ...]:
        """Return what `_fetch` does for experts; one thread reads small ones if it is not their pages that are used."""
        profile, rate = self._profile, self._profile.single_read_rate
        lanes = self._fetch(block, num_bytes, stays.routed_source, stays, in_place=stays.is_routed_in_place)
        if stays.is_routed_in_place or rate is None or block.expert_bytes >= READ_BY_ONE_THREAD_BELOW_BYTES:
            return lanes
        return tuple(
            (lane, seconds * profile.disk_rate / rate if lane == "disk" else seconds) for lane, seconds in lanes
        )

    def _fetch(
        self, block: TimedBlock, num_bytes: float, source: Source, stays: SteadyState, *, in_place: bool
    ) -> tuple[tuple[str, float], ...]:
        """Return the seconds of bringing weights to the device that runs the block, by lane."""
        profile, stored = self._profile, num_bytes * self._schedule.stored_share
        lanes: list[tuple[str, float]] = []
        home = block.routed_home if block.streams_experts and not block.is_streamed else block.home
        if home == DISK and source is Source.DISK:
            rate = profile.mapped_rate if in_place and profile.mapped_rate else profile.disk_rate
            touching = _touching(profile, stored) if stays.is_first and in_place else 0.0
            lanes.append(("disk", stored / rate + touching))
        elif home == DISK:  # pages that are cached enter the page table at once, but take their part of the window
            lanes.append(("ram", 0.0 if in_place else stored / profile.load_rate))
        if (link := self._device(block).link_in) is not None:
            lanes.append(("link", num_bytes / link))
        return tuple(lanes)
