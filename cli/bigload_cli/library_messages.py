"""Messages that libraries of models write to stderr while a model is built and runs."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silent_libraries() -> Iterator[None]:
    """Leave stderr to bigload: no warnings, log messages below errors or bars of tqdm; BIGLOAD_DEBUG=1 has all.

    transformers, torchao, bitsandbytes and compressed-tensors write a dozen lines about kernels that they do not find.
    """
    if os.environ.get("BIGLOAD_DEBUG") == "1":
        yield
        return
    before, bars = logging.root.manager.disable, os.environ.get("TQDM_DISABLE")
    logging.disable(logging.WARNING)
    os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        if bars is None:
            del os.environ["TQDM_DISABLE"]
        else:
            os.environ["TQDM_DISABLE"] = bars
