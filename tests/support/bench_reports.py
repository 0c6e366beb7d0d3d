"""Reports of benches that never ran, with figures chosen by hand."""

from bigload.bench.cases import LoadCase
from bigload.bench.loaded_memory import MemoryKind
from bigload.bench.page_cache_state import CacheState, LeftInCache
from bigload.bench.raw_limit import RawKind, RawRead
from bigload.bench.results.recommendation import Recommendation, SizeMeasured
from bigload.bench.results.report import BenchReport, BenchWarning, PeerResult, RawResult, StrategyResult
from bigload.bench.runner import Measured
from bigload.loading.settings import Method
from bigload.machine.threads.activities import Activity, Phase

GIB = 2**30
SHA = "0123456789abcdef" * 4


def measured(*seconds, private=0, file=0):
    return Measured(
        seconds=seconds,
        peak_bytes=private + file + 300 * 2**20,
        peak_private_bytes=private,
        peak_file_bytes=file,
        cached=(1.0, 1.0),
    )


def strategy(threads, method, *seconds, sha256=SHA, limit="raw memory, 4 threads", phases=None):
    case = LoadCase(threads=threads, method=method)
    is_mapped = case.memory is MemoryKind.FILE
    return StrategyResult(
        case=case,
        method=Method.READ if method is Method.AUTO else method,
        reason="the files are in the page cache",
        memory=case.memory,
        measured=measured(*seconds, private=0 if is_mapped else 4 * GIB, file=4 * GIB if is_mapped else 0),
        sha256=sha256,
        limit=limit,
        phases=phases or {},
        activities=(
            Activity(phase=Phase.READ, thread="bigload-0", start=0.0, seconds=0.5, num_bytes=7, file="a.safetensors"),
        ),
    )


def report_of(*results, **changes):
    given = {
        "path": "llama-8b",
        "total_bytes": 4 * GIB,
        "num_shards": 8,
        "num_cores": 8,
        "runs": len(results[0].seconds),
        "device": "cpu",
        "dtype": None,
        "cache": CacheState.AS_IS,
        "cached": (1.0, 1.0),
        "results": results,
    }
    return BenchReport(**(given | changes))


def full_report():
    """A bench with everything in it."""
    phases = {
        Phase.READ: 0.712,
        Phase.FAULT: 0.22,
        Phase.COPY: 0.0,
        Phase.CAST: 0.0,
        Phase.ASSIGN: 0.04,
        Phase.WAIT: 0.028,
    }
    return report_of(
        strategy(1, Method.AUTO, 1.92, 2.01, 1.98),
        strategy(4, Method.AUTO, 0.98, 1.02, 1.21, phases=phases),
        strategy(4, Method.MMAP, 1.11, 1.02, 1.22, limit="raw map, 4 threads"),
        load_average=0.4,
        raw=(
            RawResult(read=RawRead(RawKind.MEMORY, 4), measured=measured(0.98, 1.0, 0.99, private=4 * GIB)),
            RawResult(read=RawRead(RawKind.MEMORY, 8), measured=measured(1.1, 1.1, 1.1, private=4 * GIB)),
            RawResult(read=RawRead(RawKind.MAP, 4), measured=measured(0.61, 0.62, 0.6, file=4 * GIB)),
        ),
        peers=(
            PeerResult(
                name="safetensors, clone",
                package="safetensors",
                version="0.8.0",
                memory=MemoryKind.PRIVATE,
                measured=measured(6.0, 6.2, 6.4, private=4 * GIB, file=600 * 2**20),
                is_identical=True,
                limit="raw memory, 4 threads",
            ),
            PeerResult(
                name="accelerate",
                package="accelerate",
                version="1.15.0",
                memory=MemoryKind.FILE,
                is_identical=True,
                problem="OSError: [Errno 5] \x1b[2J",
            ),
            PeerResult(
                name="tensorizer",
                package="tensorizer",
                version=None,
                memory=MemoryKind.PRIVATE,
                problem="not installed",
            ),
        ),
        recommendation=Recommendation(
            strategy="auto, 4 threads",
            threads=4,
            method="read",
            sizes=tuple(
                SizeMeasured(num_bytes=num_bytes, serial_seconds=serial, parallel_seconds=parallel)
                for num_bytes, serial, parallel in ((16 << 20, 0.01, 0.01), (300 << 20, 0.2, 0.1), (GIB, 0.5, 0.25))
            ),
        ),
        left_in_cache=(LeftInCache(file="a.safetensors", num_bytes=None, reason="unknown"),),
        warnings=(BenchWarning("cache-warm", "the page cache was warm: these are memory speeds (--cold)"),),
    )
