import os
import subprocess
import sys
import time

import pytest

from bigload.machine.threads.other_programs import OtherPrograms


def with_counts(tmp_path, user, stolen=0):
    (tmp_path / "stat").write_text(f"cpu  {user} 0 0 99 5 7 7 {stolen} 0 0\ncpu0 1 2 3\n")


def seconds(number):
    return int(number * os.sysconf("SC_CLK_TCK"))


def test_what_others_use_or_the_host_takes_is_in_cores(tmp_path):
    with_counts(tmp_path, 0)
    others = OtherPrograms(proc=tmp_path)
    time.sleep(0.1)
    with_counts(tmp_path, seconds(60), stolen=seconds(40))
    found = others.busy_cores()
    assert found is not None
    assert found > 10  # 100 s in much less than 10
    assert others.disturb()


def test_own_children_are_no_others(tmp_path):
    with_counts(tmp_path, 0)
    others = OtherPrograms(proc=tmp_path)
    subprocess.run([sys.executable, "-c", "sum(range(10**6))"], check=True)
    assert others.busy_cores() == 0
    assert not others.disturb()


@pytest.mark.parametrize("text", [None, "", "cpu 1 2", "cpu a b c d e f g h"])
def test_a_kernel_that_does_not_count_says_nothing(tmp_path, text):
    if text is not None:
        (tmp_path / "stat").write_text(text)
    others = OtherPrograms(proc=tmp_path)
    assert others.busy_cores() is None
    assert not others.disturb()
