"""Entry point of the program `bigload`; verbs are imported where a Ctrl-C is caught, for imports take longest."""

from __future__ import annotations

import atexit
import gc
import signal
import sys
from contextlib import suppress


def _allow_many_open_files() -> None:
    """Raise the soft limit, often 1024, to the hard one: a checkpoint can have a thousand shards, all open at once."""
    try:
        import resource
    except ImportError:  # Windows, whose limit is not that of POSIX
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> None:
    """Run the command line and exit with its code."""
    # A run is short and makes hundreds of thousands of objects that live until its end; looking for cycles among them
    # triples the time to open a large checkpoint.
    gc.disable()
    _allow_many_open_files()
    try:
        from bigload_cli.verbs import run
    except KeyboardInterrupt:
        sys.exit(_interrupted())
    code = run()
    # A second Ctrl-C ends the process at once, without a traceback of a library that closes its connections at exit:
    # what is registered last runs first.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
    gc.freeze()  # at exit the interpreter looks for cycles all the same, for a seventh of a short run
    sys.exit(code)


def _interrupted() -> int:
    """Print the text of `failures.report` for a Ctrl-C before its import; return its exit code."""
    with suppress(OSError):
        sys.stderr.write("interrupted: nothing half-written was left\n")
    return 130
