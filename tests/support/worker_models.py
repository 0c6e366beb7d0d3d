"""Models that tests of `parallelize` send to workers, who import them from here."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn


class TwoLayers(nn.Module):
    """A column-wise layer, an activation and a row-wise one, a buffer that is stored, and one that is not."""

    def __init__(self, size=8):
        super().__init__()
        self.up = nn.Linear(size, 4 * size)
        self.down = nn.Linear(4 * size, size)
        self.register_buffer("scale", torch.full((size,), 2.0))
        self.register_buffer("shift", torch.arange(float(size)), persistent=False)

    def forward(self, x, bias=None):
        y = self.down(torch.relu(self.up(x))) * self.scale + self.shift
        return y if bias is None else {"sum": y + bias, "bias": bias}

    def twice(self, x):
        return self(self(x))

    def noise(self, num):
        return torch.rand(num)

    def speak(self, text):
        sys.stdout.write(f"{text}\n")

    def unpicklable(self, x):
        return lambda: x


class WithCaches(nn.Module):
    """Counts in a cache, as a model that generates does with keys and values."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x, cache=None):
        cache = CountingCache() if cache is None else cache
        cache.seen.append(x)
        return {"sum": sum(cache.seen) * self.weight, "cache": cache}


class CountingCache:
    def __init__(self):
        self.seen = []

    def get_seq_length(self):
        return len(self.seen)


class Deadly(nn.Module):
    """Does what it is told, on rank 1 alone where that is told, and then all ranks add up."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x, told="", rank=None):
        if told and rank in (None, dist.get_rank() if dist.is_initialized() else 0):
            getattr(self, told)()
        y = x * self.weight
        if dist.is_initialized():
            dist.all_reduce(y)
        return y

    def fail(self):
        raise ValueError("this is wrong")

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self):
        os._exit(3)

    def sleep(self):
        time.sleep(100)

    def interrupt(self):
        """Interrupt the process that waits for the answer, which does not come."""
        os.kill(os.getppid(), signal.SIGINT)
        self.sleep()

    def differ(self):
        self.weight = nn.Parameter(self.weight[:1])


class Differing(nn.Module):
    """Gives whole numbers that depend on the process."""

    def forward(self):
        return torch.tensor([dist.get_rank()])


class Unbuildable(nn.Module):
    """Cannot be made again in a worker."""

    def __setstate__(self, state):
        raise OSError("no such thing here")
