"""TCP keepalive for the connections of this process: a host that loses power or its network closes none of them.

Neither gloo nor torch's store has the kernel probe a silent connection, so whoever waits for such a host would wait for
ever. The probes are answered by the kernel of the peer, whatever its processes do: one may compute for hours.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

SILENCE_SECONDS = 60
"""Seconds without an answer after which a host's connections count as lost: longer than a switch takes to restart
a link."""

_PROBES = 6


def keep_alive() -> None:
    """Have the kernel probe all TCP connections of this process, but those for which keepalive is set already.

    It cannot be asked of gloo or of the store, which do not give their sockets away, so it goes by the descriptors of
    this process. On the connections of others it does no harm. Where a system does not list descriptors, nothing is
    done.
    """
    with suppress(OSError):
        for link in Path("/proc/self/fd").iterdir():
            descriptor = int(link.name)
            with suppress(OSError):  # that of the listing is closed again; others may be meanwhile
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    _keep_alive(descriptor)


def _keep_alive(descriptor: int) -> None:
    # Of SOCK_NONBLOCK, it is left as it is, which it shares with its owner; `socket.setdefaulttimeout` would change it.
    with socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=os.dup(descriptor)) as connection:
        is_stream = connection.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
        is_tcp = is_stream and connection.family in (socket.AF_INET, socket.AF_INET6)
        if not is_tcp or connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
            return
        connection.getpeername()  # raises unless it is connected
        period = max(SILENCE_SECONDS // _PROBES, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, period)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, period)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        # What is sent and not acknowledged is repeated for a quarter of an hour otherwise, and no probes are sent.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_SECONDS * 1000)
