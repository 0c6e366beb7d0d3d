import resource

from bigload.bench import fresh_memory
from bigload.bench.fresh_memory import renew
from bigload.units import MIB


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes():
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123  a Path would allocate on the way
        return int(file.read().split()[1]) * resource.getpagesize()


def test_memory_is_touched_and_given_back():
    before = resident_bytes()
    grown = 400 * MIB
    renew(max(peak_bytes() - before, 0) + grown)
    assert peak_bytes() >= before + grown
    assert resident_bytes() < before + 64 * MIB


def test_no_more_than_half_of_what_there_is_is_touched(monkeypatch):
    asked = []
    monkeypatch.setattr(fresh_memory, "available_memory", lambda: 10 * MIB)
    monkeypatch.setattr(fresh_memory, "allocate", lambda num_bytes: asked.append(num_bytes) or bytearray())
    renew(100 * MIB)
    assert asked == [5 * MIB]
    renew(0)
    assert asked == [5 * MIB]
