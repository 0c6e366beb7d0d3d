"""Grid of ranks: tensor-parallel ranks of pipeline stages, their hosts, and the links between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bigload.errors import OptionError
from bigload.planning.tensor_parallel.division import MAX_RANKS
from bigload.units import counted

GPU_BANDWIDTH = 450 * 10**9
"""Bytes per second from a GPU to others of its host: NVLink 4, as of H100 and H200."""

HOST_BANDWIDTH = 50 * 10**9
"""Bytes per second from a GPU to those of other hosts: 400 Gbit/s for each GPU, InfiniBand NDR."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGrid:
    """`pp` stages of `tp` ranks each, one GPU a rank, on equal `hosts`.

    Ranks of a stage follow each other, and hosts are filled one after another, as vLLM and Megatron number them.
    """

    tp: int = 1
    pp: int = 1
    hosts: int = 1

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            OptionError: one that is out of bounds, or ranks that do not divide among hosts.
        """
        for name, value in (("tp", self.tp), ("pp", self.pp), ("hosts", self.hosts)):
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANKS:
                raise OptionError.of(name, value, f"1 to {MAX_RANKS}")
        if self.num_ranks % self.hosts:
            ranks = f"{counted(self.num_ranks, 'rank')} (tp {self.tp} x pp {self.pp})"
            hint = f"a rank is a GPU: tp x pp is {self.hosts} x those of a host, for example tp 8 and pp {self.hosts}"
            expected = f"a number that divides {ranks}: hosts are alike"
            raise OptionError.of("hosts", self.hosts, expected, hint=hint)

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    @property
    def gpus_per_host(self) -> int:
        return self.num_ranks // self.hosts

    def stage_of(self, rank: int) -> int:
        """Return the stage of `rank`."""
        return rank // self.tp

    def host_of(self, rank: int) -> int:
        """Return the host of `rank`."""
        return rank // self.gpus_per_host

    def ranks_of(self, stage: int) -> range:
        """Return the ranks of `stage`."""
        return range(stage * self.tp, (stage + 1) * self.tp)

    def hosts_of(self, stage: int) -> range:
        """Return the hosts that the ranks of `stage` are on."""
        ranks = self.ranks_of(stage)
        return range(self.host_of(ranks[0]), self.host_of(ranks[-1]) + 1)

    def sends_between_hosts(self) -> Iterator[int]:
        """Yield the stages whose successor has a rank on another host than the same rank of the stage."""
        for stage in range(self.pp - 1):
            if any(self.host_of(rank) != self.host_of(rank + self.tp) for rank in self.ranks_of(stage)):
                yield stage

    def __str__(self) -> str:
        """Return for example `TP 8 x PP 2 on 2 hosts of 8 GPUs`."""
        where = "" if self.hosts == 1 else f" on {self.hosts} hosts of {self.gpus_per_host}"
        return f"TP {self.tp} x PP {self.pp}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Bytes per second that one GPU sends to others of its host, and to those of other hosts."""

    gpu: int = GPU_BANDWIDTH
    host: int = HOST_BANDWIDTH

    def __post_init__(self) -> None:
        for name, value in (("gpu_bandwidth", self.gpu), ("host_bandwidth", self.host)):
            if value <= 0:
                raise OptionError.of(name, value, "more than 0 bytes per second")


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Bytes that ranks send one another in a forward pass.

    Attributes:
        tp: Ranks that add up what they have made of the same tokens, once for each sum.
        num_sums: Sums among ranks of one host.
        num_host_sums: Sums among ranks of several hosts.
        num_sends: Handovers to the next stage, on the same host.
        num_host_sends: Those to another host.
        message_bytes: What is summed or handed over for one token of each sequence.
        logits_bytes: What each rank of the last stage gathers once from the others.
        logits_cross_hosts: Whether these are on several hosts.
    """

    tp: int
    num_sums: int
    num_host_sums: int
    num_sends: int
    num_host_sends: int
    message_bytes: int
    logits_bytes: int
    logits_cross_hosts: bool

    def seconds(self, links: Links, num_tokens: int = 1) -> float:
        """Return the time of the bytes of `num_tokens` tokens at the bandwidths of `links`; latency is not counted.

        A sum over n ranks sends 2 (n - 1) / n of its bytes from each of them, whatever the algorithm (ring or tree);
        its slowest link decides.
        """
        share = 2 * (self.tp - 1) / self.tp
        within = self.num_sums * share + self.num_sends
        between = self.num_host_sums * share + self.num_host_sends
        passed = num_tokens * self.message_bytes * (within / links.gpu + between / links.host)
        gathered = self.logits_bytes * (self.tp - 1) / self.tp
        return passed + gathered / (links.host if self.logits_cross_hosts else links.gpu)
