"""Environment variables that are set for a while.

Names and signatures are those of `accelerate.utils.environment` 1.15.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def patch_environment(**kwargs: object) -> Iterator[None]:
    """Set each keyword, in upper case, as an environment variable inside of a `with` statement."""
    names = [name.upper() for name in kwargs]
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(zip(names, map(str, kwargs.values()), strict=True))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
