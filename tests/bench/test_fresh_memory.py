import subprocess
import sys

import pytest

from bigload.bench import fresh_memory
from bigload.bench.fresh_memory import renew
from bigload.units import MIB

RENEW_IN_A_FRESH_PROCESS = """
import mmap, pathlib, resource
from bigload.bench.fresh_memory import renew
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def resident(): return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
before = resident()
reserve = peak() - before  # of the import, or of the parent: a peak never falls
renew(reserve + {grown})
print(peak() - before, resident() - before)
"""


@pytest.mark.slow
def test_memory_is_touched_and_given_back():
    grown = 300 * MIB
    code = RENEW_IN_A_FRESH_PROCESS.format(grown=grown)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    peak, kept = map(int, done.stdout.split())
    assert peak >= grown
    assert kept < 32 * MIB


def test_no_more_than_half_of_what_there_is_is_touched(monkeypatch):
    asked = []
    monkeypatch.setattr(fresh_memory, "available_memory", lambda: 10 * MIB)
    monkeypatch.setattr(fresh_memory, "allocate", lambda num_bytes: asked.append(num_bytes) or bytearray())
    renew(100 * MIB)
    assert set(asked) == {5 * MIB}
    asked.clear()
    renew(0)
    assert asked == []


@pytest.mark.parametrize(
    ("seconds", "touches"),
    [((1.0, 1.0), 2), ((3.0, 1.0, 1.2), 3), ((1.0, 3.0), 2), ((32.0, 16.0, 8.0, 4.0, 2.0), 5)],
)
def test_memory_is_touched_until_the_host_is_not_waited_for(monkeypatch, seconds, touches):
    left = list(seconds)
    monkeypatch.setattr(fresh_memory, "_touch_all", lambda _num_bytes: left.pop(0))
    renew(1)
    assert len(seconds) - len(left) == touches
