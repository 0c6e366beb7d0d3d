"""Hosts for tests: network, mount, PID, IPC and UTS namespaces of their own on this machine, joined by a bridge.

Each has its own name, loopback, `/tmp`, `/dev/shm` and process ids, and sees no process of another one. They share this
machine's clock, memory, disks, and all folders but those.

The first process of a host ends with the pipe to its input, and the kernel ends namespaces with their first process. So
nothing is left of the hosts of a test that ends, even by SIGKILL: no process, no interface, no mount.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TMP = "/tmp"
"""Of a host, which has its own."""

SHARED = f"{TMP}/shared"
NETWORK = "10.213.7"
_KINDS = ("--net", "--mount", "--pid", "--ipc", "--uts")
_UNSHARE = ("unshare", *_KINDS, "--fork", "--kill-child", "--mount-proc")

_TRIAL = ("rate", "1mbit", "burst", "9kb", "latency", "1ms")

_FIRST_PROCESS = f"""
set -e
echo "$NAME" > /proc/sys/kernel/hostname
ip link set lo up
if [ -n "$NAMES" ]; then
    mount --bind "$NAMES" /etc/hosts
    mount -t tmpfs tmpfs /dev/shm
    if [ -n "$SHARED" ]; then mount --bind "$SHARED" "$FOLDER/shared"; fi
    mount --rbind "$FOLDER" {TMP}
fi
echo ready
exec cat
"""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host of a test.

    Attributes:
        name: Its name, which all of its network know.
        address: Its address.
        tmp: Its `/tmp`, as the folder is called here.
    """

    name: str
    address: str
    tmp: Path
    _first: subprocess.Popen
    _bridge: subprocess.Popen
    _started: ExitStack

    def start(self, *command: object, **environment: str) -> subprocess.Popen:
        """Start a command, with pipes for what it writes. When this returns, it is a process of this host, or ended."""
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            _within(self._first, *map(str, command)),
            env={**os.environ, "HOME": TMP, "TMPDIR": TMP, **environment},
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        self._started.callback(_closed, process)
        while process.poll() is None and not _children(process):  # nsenter is still outside: it would outlive the host
            time.sleep(0.001)
        return process

    def die(self) -> None:
        """End all processes of this host at once, as SIGKILL does, and with them its network."""
        self._first.kill()
        self._first.wait()

    def unplug(self) -> None:
        """Cut this host off: its processes go on, and nothing closes their connections."""
        _set(self._bridge, "ip", "link", "set", self.name, "down")

    def plug_in(self) -> None:
        """Connect this host again."""
        _set(self._bridge, "ip", "link", "set", self.name, "up")

    def limit(self, rate: str, *, delay: str | None = None) -> None:
        """Let this host send `rate` at most, such as `100mbit`; and `delay` later, where `can_delay()`."""
        shape = ("tbf", "rate", rate, "burst", "64kb", "latency", "200ms")
        if delay is not None:
            shape = ("netem", "rate", rate, "delay", delay)
        _set(self._first, "tc", "qdisc", "replace", "dev", "eth0", "root", *shape)


@contextmanager
def network_hosts(count: int, folder: Path, *, shared: Path | None = None) -> Iterator[list[Host]]:
    """Yield `count` hosts in one network, which call each other `host-0` and so on.

    Args:
        count: How many.
        folder: Where their own folders are made.
        shared: A folder that all of them have as `SHARED`; by default none.
    """
    with ExitStack() as closing, ExitStack() as running:  # processes end with their host, and are closed then
        names = folder / "names"
        lines = ["127.0.0.1 localhost", *(f"{NETWORK}.{number + 1} host-{number}" for number in range(count))]
        names.write_text("\n".join([*lines, ""]))
        bridge = running.enter_context(_namespaces(NAME="bridge", NAMES=""))
        _set(bridge, "ip", "link", "add", "bridge", "type", "bridge")
        _set(bridge, "ip", "link", "set", "bridge", "up")
        hosts = []
        for number in range(count):
            name, address, own = f"host-{number}", f"{NETWORK}.{number + 1}", folder / f"host-{number}"
            own.mkdir()
            if shared is not None:
                (own / "shared").mkdir()
            named = {"NAME": name, "NAMES": str(names), "FOLDER": str(own), "SHARED": str(shared or "")}
            first = running.enter_context(_namespaces(**named))
            peer = ("peer", "name", "eth0", "netns", str(_first_pid(first)))
            _set(bridge, "ip", "link", "add", name, "type", "veth", *peer)
            _set(bridge, "ip", "link", "set", name, "master", "bridge", "up")
            _set(first, "ip", "address", "add", f"{address}/24", "dev", "eth0")
            _set(first, "ip", "link", "set", "eth0", "up")
            started = closing.enter_context(ExitStack())
            hosts.append(Host(name=name, address=address, tmp=own, _first=first, _bridge=bridge, _started=started))
        yield hosts


@cache
def why_no_hosts() -> str | None:
    """Return why this machine has no hosts for tests, `None` if it has."""
    try:
        with _namespaces(NAME="trial", NAMES="") as first:
            _set(first, "ip", "link", "add", "trial", "type", "bridge")
            _set(first, "tc", "qdisc", "replace", "dev", "lo", "root", "tbf", *_TRIAL)
    except (OSError, AssertionError) as error:
        return f"no network namespaces here, which take root, unshare, ip and tc: {str(error).strip()}"
    return None


@cache
def can_delay() -> bool:
    """Return whether the kernel can delay what a host sends (netem)."""
    with _namespaces(NAME="trial", NAMES="") as first:
        command = _within(first, "tc", "qdisc", "replace", "dev", "lo", "root", "netem", "delay", "1ms")
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextmanager
def _namespaces(**environment: str) -> Iterator[subprocess.Popen]:
    pipe = subprocess.PIPE
    command = [*_UNSHARE, "sh", "-c", _FIRST_PROCESS]
    with subprocess.Popen(
        command, env={**os.environ, **environment}, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as first:
        try:
            assert first.stdout.readline() == "ready\n", first.stderr.read()
            yield first
        finally:
            first.kill()


def _closed(process: subprocess.Popen) -> None:
    with process:
        process.kill()


def _first_pid(first: subprocess.Popen) -> int:
    (pid,) = _children(first)
    return pid


def _children(process: subprocess.Popen) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def _within(first: subprocess.Popen, *command: str, kinds: tuple[str, ...] = _KINDS) -> list[str]:
    return ["nsenter", "--target", str(_first_pid(first)), *kinds, "--", *command]


def _set(first: subprocess.Popen, *command: str) -> None:
    """Run a command in the network of `first`, and with the process ids of this one."""
    within = _within(first, *command, kinds=("--net",))
    done = subprocess.run(within, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
