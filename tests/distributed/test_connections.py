"""Keepalive for the connections of this process: what is set, and what is left as it is."""

import os
import socket
from contextlib import ExitStack

import pytest

from bigload.distributed.connections import SILENCE_SECONDS, keep_alive


@pytest.fixture
def connect():
    """A function that returns a new connection of TCP, which is closed after the test."""
    with ExitStack() as closing, socket.create_server(("127.0.0.1", 0)) as server:

        def connected():
            client = closing.enter_context(socket.create_connection(server.getsockname()))
            closing.enter_context(server.accept()[0])
            return client

        yield connected


def silence(connection):
    """Return after how many seconds the kernel gives up a connection that it probes, `None` if it does not probe."""
    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
        return None
    idle, interval, count = (
        connection.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    return idle + interval * count


def test_a_silent_host_is_given_up_and_so_is_what_is_sent_to_it(connect):
    connection = connect()
    assert silence(connection) is None
    keep_alive()
    assert SILENCE_SECONDS <= silence(connection) <= 2 * SILENCE_SECONDS
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * SILENCE_SECONDS


def test_who_has_set_keepalive_keeps_it(connect):
    connection = connect()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    before = silence(connection)
    keep_alive()
    assert silence(connection) == before
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0


def test_sockets_without_a_connection_of_tcp_are_left_as_they_are():
    with ExitStack() as closing:
        datagrams = closing.enter_context(socket.socket(type=socket.SOCK_DGRAM))
        datagrams.connect(("127.0.0.1", 9))
        listening = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
        local, other = map(closing.enter_context, socket.socketpair())
        keep_alive()
        kept = [
            each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for each in (datagrams, listening, local, other)
        ]
    assert kept == [0] * 4


@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_default_timeout_of_the_program_reaches_no_connection(connect, is_blocking):
    """The store of torch takes a socket that does not block for one whose peer is gone."""
    connection = connect()
    connection.setblocking(is_blocking)
    socket.setdefaulttimeout(5)
    try:
        keep_alive()
    finally:
        socket.setdefaulttimeout(None)
    assert silence(connection) is not None
    assert os.get_blocking(connection.fileno()) == is_blocking
