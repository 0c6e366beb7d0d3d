import threading

from bigload.loading.progress import Progress, Tally, ignore_progress
from bigload.machine.threads.thread_pool import run_jobs


def test_a_tally_begins_with_what_is_there_and_never_counts_more_than_all():
    seen = []
    tally = Tally(30, seen.append, done_bytes=10)
    for num_bytes in (15, 10, 10):
        tally.add(num_bytes, phase="read", file="a")
    tally.finish()
    assert [progress.done_bytes for progress in seen] == [25, 30, 30]


def test_a_tally_that_finishes_reports_what_was_not_counted():
    seen = []
    tally = Tally(30, seen.append)
    tally.add(10, phase="read", file="a")
    tally.finish()
    assert seen[-1] == Progress(phase="read", file="a", done_bytes=30, total_bytes=30)


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
