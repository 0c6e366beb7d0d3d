import mmap

from bigload.machine import peak_memory
from bigload.machine.peak_memory import peak_bytes, reset_peak

MIB = 1 << 20


def test_memory_that_was_held_shows_in_the_peak_until_the_reset():
    reset_peak()
    before = peak_bytes()
    with mmap.mmap(-1, 64 * MIB) as memory:
        memory.write(b"x" * 1 * MIB * 64)
        during = peak_bytes()
    assert during - before >= 64 * MIB
    assert peak_bytes() >= during
    reset_peak()
    assert peak_bytes() < during


def test_a_system_that_does_not_tell_gives_nothing(tmp_path, monkeypatch):
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t    1024 kB\n")
    monkeypatch.setattr(peak_memory, "_SELF", tmp_path)
    assert peak_bytes() == 0


def test_kilobytes_of_the_kernel_become_bytes(tmp_path, monkeypatch):
    (tmp_path / "status").write_text("VmPeak:\t  99 kB\nVmHWM:\t    1024 kB\nVmRSS:\t  7 kB\n")
    monkeypatch.setattr(peak_memory, "_SELF", tmp_path)
    assert peak_bytes() == MIB
