"""Ctrl-C at the moment at which a thread has just taken the lock of a condition."""

import sys
import threading
from contextlib import suppress


def assert_leaves_no_lock(work):
    """Interrupt `work` at the end of `Condition.__enter__`, if it calls that, and see another thread do it."""

    def interrupt(frame, event, _):
        if frame.f_code is threading.Condition.__enter__.__code__ and event == "return":
            raise KeyboardInterrupt
        return interrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with suppress(KeyboardInterrupt):
            work()
    finally:
        sys.settrace(before)
    other = threading.Thread(target=work, daemon=True)
    other.start()
    other.join(30)
    assert not other.is_alive()
