"""Digest of loaded tensors, the proof that two loaders gave the same bytes."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from bigload.machine.thread_pool import default_threads, run_jobs

if TYPE_CHECKING:
    import torch


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return SHA-256, in hexadecimal, of names and bytes in the order of the names, whatever the order of loading."""
    digests: dict[str, bytes] = {}

    def digest(name: str) -> None:
        tensor = tensors[name].detach().cpu().contiguous()
        num_bytes = tensor.numel() * tensor.element_size()
        memory = (ctypes.c_char * num_bytes).from_address(tensor.data_ptr()) if num_bytes else b""
        digests[name] = hashlib.sha256(memory).digest()

    run_jobs(digest, list(tensors), threads=default_threads())
    return hashlib.sha256(b"".join(name.encode() + digests[name] for name in sorted(tensors))).hexdigest()
