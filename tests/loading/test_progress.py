import threading

from bigload.loading.progress import Progress, Tally, ignore_progress
from bigload.machine.thread_pool import run_jobs


def test_a_tally_counts_up_to_the_total():
    seen = []
    tally = Tally(30, seen.append)
    tally.add(10, phase="read", file="a")
    tally.add(20, phase="read", file="b")
    assert seen == [
        Progress(phase="read", file="a", done_bytes=10, total_bytes=30),
        Progress(phase="read", file="b", done_bytes=30, total_bytes=30),
    ]


def test_reports_come_one_at_a_time_and_never_go_back():
    running, seen = threading.Lock(), []

    def on_progress(progress):
        assert running.acquire(blocking=False), "two calls at the same time"
        seen.append(progress.done_bytes)
        running.release()

    tally = Tally(300, on_progress)
    run_jobs(lambda job: tally.add(1, phase="read", file="a"), range(300), threads=4)
    assert seen == list(range(1, 301))


def test_nobody_has_to_watch():
    ignore_progress(Progress(phase="read", file="a", done_bytes=1, total_bytes=1))
