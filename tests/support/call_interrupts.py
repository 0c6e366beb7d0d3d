"""Ctrl-C at each moment at which CPython serves signals in a piece of work: functions begin there, or C ones return."""

import sys
from pathlib import Path

import bigload

FOLDER = str(Path(bigload.__file__).parent)


def interrupted(work, number):
    """Call `work`, with a KeyboardInterrupt at moment `number` in the code of bigload; return the functions under way.

    The innermost comes first; there are none when `work` ends before. An interrupt in a finaliser is swallowed.
    """
    passed, stack = 0, []

    def interrupt(frame, event, _):
        nonlocal passed
        if event in {"call", "c_return"} and frame.f_code.co_filename.startswith(FOLDER):
            passed += 1
            if passed == number:
                sys.setprofile(None)
                while frame is not None:
                    stack.append(frame.f_code.co_name)
                    frame = frame.f_back
                raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        work()
    except KeyboardInterrupt:
        assert stack
    finally:
        sys.setprofile(None)
    return stack
