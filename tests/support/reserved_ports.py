"""Ports for servers that a test's processes start later, and that no other program is given meanwhile."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port of TCP at which a server that reuses addresses, as torch's do, may listen as long as this lasts.

    Linux gives a port to several sockets that reuse addresses, of which one listens, and never chooses it by itself.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
