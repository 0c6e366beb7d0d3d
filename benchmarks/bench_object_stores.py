"""Compare the clients of object stores on a loopback S3: obstore, s3fs, and plain HTTP of the same files.

    python benchmarks/bench_object_stores.py [--runs 3] [--latency 0.0]

Each run is a process: `plan` opens and plans a 70B checkpoint of 30 shards, nothing cached; `again` is the same once
more, as commands do it; `load` reads 1 GiB of one after it was opened. Clients take turns. s3fs is left out where it is
not installed. The server is in this process and shares the cores: compare the figures of one run.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from bench_remote import Run, in_words, run

from harness import show_status
from hub_server import HubServer
from make import load_recipe, make

PLAN = "bigload.plan(checkpoint, {'cuda:0': '80GiB', 'cuda:1': '80GiB', 'cpu': '64GiB'})"
JOBS = {
    "plan": PLAN,
    "again": PLAN,
    "load": "bigload.load(checkpoint, only=names)",
}
PROGRAM = """
import sys
import bigload
from bigload.checkpoint.byte_source import register_scheme
from bigload.checkpoint.sources.fsspec_files import scheme_named

if sys.argv[1] == "s3fs":
    register_scheme(scheme_named("s3"))
checkpoint = bigload.open_checkpoint(sys.argv[2], trusts_recent=True)
names, num_bytes = [], 0
for tensor in checkpoint.tensors.values():
    if num_bytes < 1 << 30:
        names.append(tensor.name)
        num_bytes += tensor.num_bytes
"""


def main() -> None:
    """Make the checkpoint, serve it and time the clients."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer")
    arguments = parser.parse_args()
    clients = ["http", *(name for name in ("obstore", "s3fs") if find_spec(name))]
    with tempfile.TemporaryDirectory() as folder, HubServer(latency=arguments.latency, hashes=False) as server:
        for job, model in (("plan", "llama-70b"), ("again", "llama-70b"), ("load", "llama-4gb")):
            if job != "again":
                make(load_recipe(model), Path(folder, model), data="sparse")
            variables = server.serve_bucket("models", Path(folder))
            locations = dict.fromkeys(clients, f"s3://models/{model}") | {
                "http": f"{server.serve('models', Path(folder))}/{model}"
            }
            runs: dict[str, list[Run]] = {client: [] for client in clients}
            for index in range(arguments.runs):
                show_status(f"{job}, run {index + 1} of {arguments.runs}")
                for client, location in locations.items():
                    caches = server.environment(Path(folder, f"cache-{model}-{client}-{index}"))
                    command = [sys.executable, "-c", PROGRAM + JOBS[job], client, location]
                    runs[client].append(run(server, command, {**os.environ, **caches, **variables}))
            idle = run(server, [sys.executable, "-c", "pass"], dict(os.environ)).peak_bytes
            show_status("")
            print(f"{job} of {model}, {arguments.latency * 1000:.0f} ms latency, {arguments.runs} runs")
            for client, found in runs.items():
                print(f"  {client:8} {in_words(found, idle)}")


if __name__ == "__main__":
    main()
