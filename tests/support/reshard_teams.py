"""One reshard by several processes, and what has to be true of one that goes on with it."""

from bigload.layouts.reshard import reshard
from bigload.layouts.writing import staging
from builders import contents
from thread_process_groups import outcomes


def make_impatient(monkeypatch):
    """Have processes that wait for others give up soon."""
    monkeypatch.setattr(staging, "_SIGHT_SECONDS", 0.3)
    monkeypatch.setattr(staging, "_LEAVE_SECONDS", 0.3)


def run(source, out, team, **options):
    return reshard(source, out, threads=2, team=team, **options)


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


def check_resumed(source, out, expected, size, *, run):
    """Go on with `size` processes, and find the bytes of one that was never interrupted."""
    reports = outcomes(size, lambda team: run(source, out, team, resume=True))
    assert [getattr(report, "out", report) for report in reports] == [out] * size
    assert contents(out) == expected
    assert entries(out.parent) == [out.name]
    return reports[0]
