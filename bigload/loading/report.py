"""Report of a load: method and reason, bytes, seconds, and the phases of each thread when it is traced."""

from __future__ import annotations

from dataclasses import dataclass

from bigload.loading.settings import Method
from bigload.machine.threads.activities import Activity, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Result of a load, without its tensors.

    Attributes:
        method: The one that was used; never `auto`.
        reason: Why that one, as half a sentence.
        threads: Threads that read.
        max_inflight_bytes: The bound on bytes that were being read or staged at one moment.
        read_bytes: Bytes that were asked of the files.
        tensor_bytes: Bytes of the tensors that came out.
        seconds: From the first check to the last assignment.
        activities: What each thread did and when; empty unless the load was traced.
        left_on_disk: Tensors that the plan keeps on disk: they were not read.
    """

    method: Method
    reason: str
    threads: int
    max_inflight_bytes: int
    read_bytes: int
    tensor_bytes: int
    seconds: float = 0.0
    activities: tuple[Activity, ...] = ()
    left_on_disk: tuple[str, ...] = ()

    @property
    def phase_seconds(self) -> dict[Phase, float]:
        """Return the seconds of each phase, all threads together; empty unless the load was traced."""
        seconds: dict[Phase, float] = {}
        for activity in self.activities:
            seconds[activity.phase] = seconds.get(activity.phase, 0.0) + activity.seconds
        return seconds
