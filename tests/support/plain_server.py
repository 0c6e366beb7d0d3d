"""The web server of `python -m http.server`: HTTP/1.0, no byte ranges, no ETag, one connection for each request."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PIECE_BYTES = 1 << 16


class PlainServer(ThreadingHTTPServer):
    """Serves a folder at `url`, and counts the bytes that were sent of each file."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIECE_BYTES)  # what waits there counts as sent
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.sent: list[list] = []  # path and bytes of each answer
        self.before_piece = lambda: None
        self.hides_sizes = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that close a connection before its end are part of the tests."""

    def bytes_of(self, ending: str) -> list[int]:
        """Return how many bytes each answer had whose path ends so."""
        return [count for path, count in self.sent if path.endswith(ending)]


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def send_header(self, keyword: str, value: str) -> None:
        if not (self.server.hides_sizes and keyword == "Content-Length"):
            super().send_header(keyword, value)

    def copyfile(self, source, outputfile) -> None:
        answer = [self.path, 0]
        self.server.sent.append(answer)
        while piece := source.read(PIECE_BYTES):
            self.server.before_piece()
            answer[1] += len(piece)  # before the client has it and goes on
            outputfile.write(piece)


@contextmanager
def served_plainly(folder: Path):
    """Serve `folder` as `python -m http.server` does."""
    with PlainServer(folder) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()
