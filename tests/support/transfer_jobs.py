"""Jobs that use `Transfers` as a loader does, for simulated and real accelerators."""

import torch

from bigload.machine.threads.thread_pool import run_jobs


def cut(num_bytes, most):
    """Return starts and stops of pieces of `most` bytes, the last one smaller."""
    return [(start, min(start + most, num_bytes)) for start in range(0, num_bytes, most)]


def send_all(transfers, host, destination, *, threads, block_bytes, offset=0, fault=lambda start: None):
    """Bring the elements of `host` to `destination` as an engine would, each piece `offset` into its block."""
    stored = host.view(-1).view(torch.uint8).tolist()
    flat = destination.view(-1)
    width, room = host.dtype.itemsize, block_bytes - offset

    def work(piece):
        start, stop = piece
        try:
            block = transfers.take()
            try:
                fault(start)
                length = stop - start
                block.memory[offset : offset + length] = bytes(stored[start:stop])
                part = flat[start // width : stop // width]
                transfers.send(block, offset, offset + length, part, dtype=host.dtype)
            finally:
                transfers.release(block)
        except BaseException as error:
            transfers.abort(error)
            raise

    run_jobs(work, cut(len(stored), room - room % width), threads=threads)


def numbers(count, dtype=torch.float32, *, seed=0):
    """Return `count` elements that tell their places apart, and none that a cast makes NaN."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator).to(dtype)
