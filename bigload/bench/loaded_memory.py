"""Memory that loads end in: its kinds, the wait until it can be used, and the digest of what is in it."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

from bigload.machine.threads.thread_pool import default_threads, run_jobs
from bigload.units import MIB

if TYPE_CHECKING:
    import torch

_PAGE = mmap.PAGESIZE
_PIECE_BYTES = 64 * MIB


class MemoryKind(StrEnum):
    """The memory that holds loaded bytes; only loads of one kind are compared.

    `private`: writable memory of this process. `file`: pages of the file in the page cache, shared with other maps.
    `device`: memory of an accelerator.
    """

    PRIVATE = "private"
    FILE = "file"
    DEVICE = "device"


def finish(tensors: Iterable[torch.Tensor], memory: MemoryKind) -> None:
    """Return when every byte of `tensors` can be used: pages of files are touched, copies to a device waited for."""
    if memory is MemoryKind.FILE:
        touch(tensors)
    elif memory is MemoryKind.DEVICE:
        import torch

        torch.accelerator.synchronize()


def touch(tensors: Iterable[torch.Tensor]) -> int:
    """Read one byte of every page that holds a part of `tensors`, on a few threads; return how many were read.

    All contenders are touched alike, so that maps of bigload and of others can be compared.
    """
    pieces = list(_pieces(tensors))
    run_jobs(_read, pieces, threads=default_threads())
    return sum(piece.numel() for piece in pieces)


def _pieces(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield bytes a page apart, and the last byte, of every tensor, in pieces that threads can share."""
    import torch

    for tensor in tensors:
        if tensor.numel() == 0 or tensor.device.type != "cpu":
            continue
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, raw.numel(), _PIECE_BYTES):
            yield raw[start : start + _PIECE_BYTES : _PAGE]
        yield raw[-1:]


def _read(piece: torch.Tensor) -> None:
    piece.max()


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
