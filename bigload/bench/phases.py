"""Shares of the time of a traced load by phase."""

from __future__ import annotations

from bigload.loading.report import LoadReport
from bigload.machine.activities import Phase


def phase_shares(report: LoadReport) -> dict[Phase, float]:
    """Return the share of threads × wall time that each phase took; they add up to 1, empty without a trace.

    Time that no activity covers counts as waiting: for another thread, the interpreter, a first or last block.
    """
    seconds = report.phase_seconds
    if not seconds:
        return {}
    whole = max(report.threads * report.seconds, sum(seconds.values()))
    shares: dict[Phase, float] = {phase: seconds.get(phase, 0.0) / whole for phase in Phase if phase != Phase.WAIT}
    shares[Phase.WAIT] = max(0.0, 1 - sum(shares.values()))
    return shares
