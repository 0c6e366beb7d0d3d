"""Messages that libraries of models write to stderr while a model is built and runs."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@contextmanager
def silent_libraries() -> Iterator[None]:
    """Leave stderr to bigload: no warnings, log messages below errors or bars of tqdm; BIGLOAD_DEBUG=1 has all.

    transformers, torchao, bitsandbytes and compressed-tensors write a dozen lines about kernels that they do not find.
    """
    if os.environ.get("BIGLOAD_DEBUG") == "1":
        yield
        return
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), _no_bars():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def _no_bars() -> Iterator[None]:
    """Disable bars of tqdm, also those that are asked for with `disable=False`, which no variable disables."""
    if find_spec("tqdm") is None:
        yield
        return
    tqdm: Any = import_module("tqdm").tqdm
    begin = tqdm.__init__

    def disabled(bar: object, *arguments: object, **given: object) -> None:
        begin(bar, *arguments, **{**given, "disable": True})

    tqdm.__init__ = disabled
    try:
        yield
    finally:
        tqdm.__init__ = begin
