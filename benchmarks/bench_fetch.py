"""Measure fetch, load and reshard from a loopback Hub, beside a plain client, `snapshot_download` and local reshards.

    python benchmarks/bench_fetch.py [--rounds 3] [--recipe llama-3gb] [--latency 0.05] [--gbit 1] [--only PATTERN]

Contenders are whole processes, in rotating order; all but those named local share one line of the given rate. The
plain client reads ranges of 64 MiB over as many connections as bigload, writes them, and checks nothing. For each: its
seconds, and of those the ones before the line sends data, the ones in which it then idles, and the ones after the last
byte. Goals are ratios within a round. The server is in this process and shares the cores, so compare figures of one
run. Last comes the share of a tensor-parallel rank, without data: what one of eight would transfer.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import queue
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from bench_remote import BIGLOAD, Run, run

from harness import in_rounds, show_status
from hub_server import HubServer
from make import load_recipe, make

CONNECTIONS = 16
RANGE_BYTES = 64 << 20
SNAPSHOT = "import sys; from huggingface_hub import snapshot_download as s; s(sys.argv[1], local_dir=sys.argv[2])"
IMPORT = "import sys, torch, bigload; load = bigload.load"
LOAD = f"{IMPORT}; load(sys.argv[1])"
RESHARDS = {"shards": ("--max-shard-size", "500MB"), "--tp 8": ("--tp", "8")}
GOALS = (
    ("fetch", "", ("plain",), 1 / 0.95),
    ("fetch", "", ("snapshot_download",), 1.0),
    ("load", "import", ("fetch",), 1.1),
    *((f"reshard {name}", "", ("fetch", f"local {name}"), 1.1) for name in RESHARDS),
)
"""A contender; one whose seconds are subtracted; those of which the slowest is the limit; the bound of the ratio."""


def main() -> None:
    """Make the model, serve it and time the contenders."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds, after one that is not")
    parser.add_argument("--recipe", default="llama-3gb")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds before each answer")
    parser.add_argument("--gbit", type=float, default=1.0, help="rate of the line that all answers share")
    parser.add_argument("--only", default="", metavar="PATTERN", help="contenders whose names match; default: all")
    parser.add_argument("--folder", type=Path, help="where to write; by default the folder for temporary files")
    parser.add_argument("--plain-client", nargs=3, metavar=("ENDPOINT", "REPOSITORY", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plain_client:
        fetch_plainly(*arguments.plain_client)
        return
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
        HubServer(latency=arguments.latency, bandwidth=arguments.gbit * 125e6) as hub,
    ):
        compare(hub, Path(folder), arguments)
        show_share_of_a_rank(hub, Path(folder))


def compare(hub: HubServer, folder: Path, arguments: argparse.Namespace) -> None:
    """Print a row for each contender, and the goals."""
    make(load_recipe(arguments.recipe), folder / "model", data="random")
    repository = hub.add("org/model", folder / "model", lfs_bytes=10 << 20)
    size = 0
    for path in (folder / "model").iterdir():
        hub.etag(repository, path)  # digests are made once, before the clock runs
        size += path.stat().st_size
    out = folder / "out"
    commands = {
        "plain": [sys.executable, __file__, "--plain-client", hub.url, "org/model", str(out)],
        "snapshot_download": [sys.executable, "-c", SNAPSHOT, "org/model", str(out)],
        "fetch": [BIGLOAD, "fetch", "org/model", str(out), "-q"],
        "import": [sys.executable, "-c", IMPORT],
        "load": [sys.executable, "-c", LOAD, "org/model"],
    }
    for name, words in RESHARDS.items():
        commands[f"reshard {name}"] = [BIGLOAD, "reshard", "org/model", str(out), "-q", *words]
        commands[f"local {name}"] = [BIGLOAD, "reshard", str(folder / "model"), str(out), "-q", *words]
    number = iter(range(1000))

    def timed(name: str) -> Run:
        shutil.rmtree(out, ignore_errors=True)
        show_status(name)
        return run(hub, commands[name], {**os.environ, **hub.environment(folder / f"cache-{next(number)}")})

    chosen = {name: partial(timed, name) for name in commands if re.search(arguments.only, name)}
    found = in_rounds(chosen, rounds=arguments.rounds)
    show_status("")
    line = f"{arguments.gbit:g} Gbit/s, {arguments.latency * 1000:.0f} ms"
    alone = size / (arguments.gbit * 125e6)
    print(f"{size / 1e9:.2f} GB, {line}, {arguments.rounds} rounds; the line alone takes {alone:.2f} s")
    for name, runs in found.items():
        seconds = [each.seconds for each in runs]
        before, idle, after = (
            statistics.median(getattr(each, part) for each in runs) for part in ("before", "idle", "after")
        )
        print(
            f"  {name:18} median {statistics.median(seconds):6.2f} s ({min(seconds):.2f} … {max(seconds):.2f})"
            f"  before {before:5.2f}  idle {idle:5.2f}  after {after:5.2f}"
            f"  cpu {min(each.cpu_seconds for each in runs):5.2f} s"
            f"  {max(each.peak_bytes for each in runs) / 2**20:5.0f} MiB"
            f"  {max(each.requests for each in runs):4} requests"
            f"  {max(each.num_bytes for each in runs) / size:.3f} of the bytes"
        )
    seconds_of = {name: [each.seconds for each in runs] for name, runs in found.items()} | {
        "": [0.0] * arguments.rounds
    }
    for name, besides, limits, bound in GOALS:
        if {name, besides, *limits} <= seconds_of.keys():
            slowest = map(max, zip(*(seconds_of[limit] for limit in limits), strict=True))
            rounds = zip(seconds_of[name], seconds_of[besides], slowest, strict=True)
            ratios = [(own - beside) / limit for own, beside, limit in rounds]
            print(
                f"  {name}{besides and f' - {besides}'} / max({', '.join(limits)}): {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} … {max(ratios):.2f}), goal: <= {bound:.2f}"
            )


def fetch_plainly(endpoint: str, repository: str, out: str) -> None:
    """Read ranges of all files over kept-alive connections, and write them where they belong."""
    asked = http.client.HTTPConnection(urlsplit(endpoint).netloc)
    asked.request("GET", f"/api/models/{repository}/revision/main?blobs=true")
    document = json.loads(asked.getresponse().read())
    ranges: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()
    Path(out).mkdir()
    for sibling in document["siblings"]:
        with Path(out, sibling["rfilename"]).open("wb") as file:
            file.truncate(sibling["size"])
        for start in range(0, sibling["size"], RANGE_BYTES):
            ranges.put((sibling["rfilename"], start, min(start + RANGE_BYTES, sibling["size"])))

    def work() -> None:
        connections: dict[str, http.client.HTTPConnection] = {}
        with suppress(queue.Empty):
            while True:
                name, start, stop = ranges.get_nowait()
                address = f"{endpoint}/{repository}/resolve/{document['sha']}/{name}"
                receive(connections, address, Path(out, name), start, stop)

    threads = [threading.Thread(target=work) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def receive(
    connections: dict[str, http.client.HTTPConnection], address: str, path: Path, start: int, stop: int
) -> None:
    """Write bytes `start` to `stop` of the file at `address` into that at `path`; redirects are followed."""
    while True:
        host = urlsplit(address).netloc
        client = connections.setdefault(host, http.client.HTTPConnection(host))
        client.request("GET", address.split(host, 1)[1], headers={"Range": f"bytes={start}-{stop - 1}"})
        answer = client.getresponse()
        if answer.status != 302:
            break
        answer.read()
        address = answer.headers["Location"]
    buffer = memoryview(bytearray(1 << 20))
    descriptor = os.open(path, os.O_WRONLY)
    while count := answer.readinto(buffer):
        os.pwrite(descriptor, buffer[:count], start)
        start += count
    os.close(descriptor)
    if start != stop:
        raise SystemExit(f"{path.name} ended at byte {start}")


def show_share_of_a_rank(hub: HubServer, folder: Path) -> None:
    """Print what one of eight ranks of a 70B transfers."""
    make(load_recipe("llama-70b"), folder / "llama-70b", data="sparse")
    hub.hashes = False
    hub.add("org/llama-70b", folder / "llama-70b", lfs_bytes=10 << 20)
    command = [
        BIGLOAD,
        "fetch",
        "org/llama-70b",
        str(folder / "rank"),
        "--rank",
        "3",
        "--tp",
        "8",
        "--dry-run",
        "--json",
    ]
    environment = {**os.environ, **hub.environment(folder / "cache-rank")}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:  # the disk has to have room for it
        raise SystemExit(f"no share of a rank: {ran.stdout}{ran.stderr}")
    done = json.loads(ran.stdout)
    total = sum(path.stat().st_size for path in (folder / "llama-70b").glob("*.safetensors"))
    written = sum(file["total_bytes"] for file in done["files"] if file["num_tensors"])
    print(
        f"rank 3 of 8 of llama-70b: {written / total:.1%} of the bytes to write, "
        f"{done['transfer_bytes'] / total:.1%} to transfer in {done['num_ranges']} ranges "
        "(matrices that are cut by columns come whole)"
    )


if __name__ == "__main__":
    main()
