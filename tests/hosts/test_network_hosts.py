"""The hosts that tests use are apart from each other, and nothing is left of them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import network_hosts as support

WATCHED = """
import sys, time
from pathlib import Path
from network_hosts import network_hosts
with network_hosts(2, Path(sys.argv[1])) as hosts:
    hosts[1].start("sleep", "1000")
    print("ready", flush=True)
    time.sleep(1000)
"""


def said(host, *command):
    process = host.start(*command)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output.split()


def test_hosts_have_names_folders_and_processes_of_their_own(make_hosts):
    first, second = make_hosts(2, has_shared=True)
    assert [said(host, "uname", "-n") for host in (first, second)] == [["host-0"], ["host-1"]]
    said(first, "touch", "/tmp/mine", "/tmp/shared/ours", "/dev/shm/memory")
    assert said(second, "ls", "/tmp", "/dev/shm") == ["/dev/shm:", "/tmp:", "shared"]
    assert said(second, "ls", "/tmp/shared") == ["ours"]
    assert (first.tmp / "mine").exists()
    assert said(second, "ps", "-e", "-o", "comm=") == ["cat", "ps"]


def test_a_host_hears_the_others_until_it_is_unplugged(make_hosts):
    first, second = make_hosts(2)
    ask = "import socket; s = socket.create_connection(('host-0', 4000), 2); print(s.recv(9).decode())"
    answer = "import socket; s = socket.create_server(('', 4000))\nwhile True: s.accept()[0].send(b'here')"
    first.start(sys.executable, "-c", answer)
    deadline = time.monotonic() + 60
    told = ""
    while not told and time.monotonic() < deadline:
        told, _ = second.start(sys.executable, "-c", ask).communicate(timeout=60)
    assert told == "here\n"
    second.limit("10mbit")
    second.unplug()
    _, errors = second.start(sys.executable, "-c", ask).communicate(timeout=60)
    assert "timed out" in errors or "No route to host" in errors  # the latter comes after 3 s: who slept may hear it


def test_a_host_that_dies_ends_its_processes(make_hosts):
    first, second = make_hosts(2)
    mine, other = first.start("sleep", "1000"), second.start("sleep", "1000")
    first.die()
    assert mine.wait(20) == -signal.SIGKILL
    assert other.poll() is None
    second.die()
    assert other.wait(20) == -signal.SIGKILL


def test_nothing_is_left_when_their_test_is_killed(make_hosts, tmp_path):
    make_hosts(1)  # or skips
    path = os.pathsep.join((str(Path(support.__file__).parent), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-c", WATCHED, str(tmp_path)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True) as test:
        try:
            assert test.stdout.readline() == "ready\n"
            theirs = descendants(test.pid)
            assert len(theirs) > 6
        finally:
            test.kill()
    deadline = time.monotonic() + 20
    while left := [pid for pid in theirs if is_running(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    links = json.loads(subprocess.run(["ip", "-json", "link"], capture_output=True, check=True).stdout)
    assert not [link["ifname"] for link in links if link["ifname"].startswith("host-")]
    assert str(tmp_path / "host-") not in Path("/proc/mounts").read_text()


def descendants(pid):
    children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(each for child in children for each in descendants(child))]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
