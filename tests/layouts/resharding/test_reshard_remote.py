"""Checkpoints of the Hub and of web servers are resharded from the network: few requests, bytes transferred once."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from plain_server import served_plainly
from safetensors.torch import save_file

import bigload
from bigload.checkpoint.byte_source import WholeFilesWarning
from bigload.checkpoint.records.manifest import MANIFEST_FILE
from bigload.checkpoint.sources import hub, range_streams
from bigload.checkpoint.sources.http_requests import RateLimitWarning
from bigload.errors import AccessDeniedError, ReadError
from bigload.layouts.resharding import names
from bigload.layouts.writing import recent_bytes
from bigload.layouts.writing import windows as windows_module
from bigload.layouts.writing import writer as writer_module
from bigload.layouts.writing.output_file_writer import OutputFileWriter, direct_write_alignment
from bigload.units import KIB, MIB
from builders import make_checkpoint, make_mixtral, no_thread_left, open_descriptors, write_raw
from hub_server import CHUNK_BYTES, served_hub
from thread_process_groups import outcomes

HIDDEN = 256


@pytest.fixture
def source(tmp_path):
    """A llama of 9 MB in two shards."""
    folder = make_checkpoint(tmp_path / "source", blocks=2, shards=2, hidden=HIDDEN, vocab=2048)
    config = json.loads((folder / "config.json").read_text())
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "vocab_size": 2048, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": HIDDEN // 8}
    (folder / "config.json").write_text(json.dumps({**config, **sizes, **heads}))
    return folder


@pytest.fixture
def served(tmp_path, monkeypatch, source):
    for module in (range_streams, recent_bytes):  # as small beside these tensors as it is beside those of models
        monkeypatch.setattr(module, "MAX_GAP_BYTES", 2 * KIB)
    with served_hub(monkeypatch, tmp_path / "cache") as server:
        server.add("org/tiny", source)
        server.source = source
        yield server


def data_bytes(source):
    return sum(file.stat().st_size for file in source.glob("*.safetensors"))


def weights(folder):
    """The bytes of all files of weights."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".safetensors", ".dat")
    }


LAYOUTS = {
    "shards": {"max_shard_bytes": 3_000_000},
    "ranks": {"tp": 4},
    "offload": {"layout": "offload"},
    "dat": {"layout": "offload", "offload_format": "dat"},
    "cast": {"dtype": "fp32", "max_shard_bytes": 3_000_000},
    "cast ranks": {"dtype": "fp16", "tp": 2},
    "transformers' names": {"names": "transformers"},
}


def layouts(*quick):
    """Return the options of all layouts as parameters; those that are not `quick` are slow."""
    marks = {name: () if name in quick else pytest.mark.slow for name in LAYOUTS}
    return [pytest.param(options, id=name, marks=marks[name]) for name, options in LAYOUTS.items()]


@pytest.mark.parametrize("options", layouts("ranks", "offload", "cast", "transformers' names"))
@pytest.mark.parametrize("scheme", ["hub", pytest.param("https", marks=pytest.mark.slow)])
@pytest.mark.sample(2)
def test_every_layout_and_dtype_is_what_it_is_from_a_folder(served, tmp_path, options, scheme):
    remote = "org/tiny" if scheme == "hub" else served.serve("files", served.source)
    bigload.reshard(served.source, tmp_path / "local", **options)
    descriptors = len([each for each in open_descriptors() if "memfd" in each])
    bigload.reshard(remote, tmp_path / "remote", **options)
    assert weights(tmp_path / "remote") == weights(tmp_path / "local")
    assert bigload.verify(tmp_path / "remote").ok
    assert len([each for each in open_descriptors() if "memfd" in each]) == descriptors


def test_a_plan_is_carried_out_from_the_hub(served, tmp_path):
    plan = bigload.plan("org/tiny", {"cpu": "4MiB", "disk": "1GiB"})
    bigload.reshard(plan, tmp_path / "remote")
    bigload.reshard(bigload.plan(served.source, {"cpu": "4MiB", "disk": "1GiB"}), tmp_path / "local")
    assert weights(tmp_path / "remote") == weights(tmp_path / "local")


@pytest.mark.parametrize("tp", [None, 4])
@pytest.mark.sample(2)
def test_bytes_are_transferred_once_also_of_tensors_divided_by_columns(served, tmp_path, monkeypatch, tp):
    monkeypatch.setattr(writer_module, "window_bytes", lambda options: 16 * KIB)
    monkeypatch.setattr(windows_module, "LEAST_CUT_BYTES", 16 * KIB)
    bigload.plan("org/tiny", {"cpu": "1GiB"})
    served.requests.clear()
    bigload.reshard("org/tiny", tmp_path / "out", tp=tp, threads=2)
    assert served.num_bytes < 1.1 * data_bytes(served.source)
    bigload.reshard(served.source, tmp_path / "local", tp=tp)
    assert weights(tmp_path / "out") == weights(tmp_path / "local")


@pytest.mark.parametrize(
    ("write", "is_direct"),
    [(bigload.fetch, True), (partial(bigload.reshard, tp=2), False)],
    ids=["whole files", "cut at tensors that are not whole blocks"],
)
def test_windows_of_whole_blocks_are_written_past_the_page_cache(served, tmp_path, monkeypatch, write, is_direct):
    if direct_write_alignment(tmp_path) is None:
        pytest.skip("the file system offers no direct writes")
    monkeypatch.setattr(windows_module, "LEAST_CUT_BYTES", 20 * KIB)
    asked = []

    class Recorded(OutputFileWriter):
        def __init__(self, path, **options):
            asked.append(options["alignment"] is not None)
            super().__init__(path, **options)

    monkeypatch.setattr(writer_module, "OutputFileWriter", Recorded)
    write("org/tiny", tmp_path / "out")
    assert set(asked) == {is_direct}
    assert bigload.verify(tmp_path / "out").ok


def test_files_beside_the_weights_are_transferred_once_for_all_ranks(served, tmp_path):
    (served.source / "tokenizer.json").write_text("{}")
    bigload.plan("org/tiny", {"cpu": "1GiB"})
    served.requests.clear()
    bigload.reshard("org/tiny", tmp_path / "out", tp=4)
    asked = [request.path.rpartition("/")[2] for request in served.requests if request.path.endswith(".json")]
    assert sorted(asked) == ["config.json", "tokenizer.json"]
    config = (served.source / "config.json").read_bytes()
    assert [path.read_bytes() for path in (tmp_path / "out").rglob("config.json")] == [config] * 5


def test_requests_are_few(served, tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "window_bytes", lambda options: 64 * KIB)
    bigload.plan("org/tiny", {"cpu": "1GiB"})
    served.requests.clear()
    bigload.reshard("org/tiny", tmp_path / "out", threads=2)
    num_windows = data_bytes(served.source) / (64 * KIB)
    assert len([request for request in served.requests if request.route == "cdn"]) < num_windows / 2


def test_what_was_written_is_not_transferred_again(served, tmp_path, monkeypatch):
    """The output is read back: also what lies behind a gap, and a change of one byte is noticed."""
    monkeypatch.setattr(writer_module, "window_bytes", lambda options: 64 * KIB)
    bigload.reshard(served.source, tmp_path / "local")
    bigload.plan("org/tiny", {"cpu": "1GiB"})
    served.fault("cdn", file="00002-of-00002.safetensors", times=-1, status=403)
    with pytest.raises(AccessDeniedError):
        bigload.reshard("org/tiny", tmp_path / "out", threads=1)
    done = served.num_bytes
    assert done > MIB
    served.faults.clear()
    written = next((tmp_path / "out.partial").glob("*.safetensors"))
    with written.open("r+b") as file:
        file.seek(100_000)
        byte = file.read(1)
        file.seek(100_000)
        file.write(bytes([byte[0] ^ 1]))
    served.requests.clear()
    report = bigload.reshard("org/tiny", tmp_path / "out", resume=True, threads=1)
    assert report.kept_bytes > MIB
    assert weights(tmp_path / "out") == weights(tmp_path / "local")
    assert served.num_bytes + report.kept_bytes < data_bytes(served.source) + 400 * KIB


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    "fault",
    [{"cut_after": 100_000}, {"status": 429, "headers": {"Retry-After": "1"}}, {"status": 503}, {"status": 500}],
    ids=["cut", "429", "503", "500"],
)
@pytest.mark.sample(2)
def test_failures_that_pass_cost_nothing_but_time(served, tmp_path, fault, threads):
    bigload.plan("org/tiny", {"cpu": "1GiB"})
    served.fault("cdn", times=3, **fault)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RateLimitWarning)
        bigload.reshard("org/tiny", tmp_path / "out", threads=threads)
    bigload.reshard(served.source, tmp_path / "local")
    assert weights(tmp_path / "out") == weights(tmp_path / "local")


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ({"headers": {"X-Linked-Etag": '"another"'}, "route": "resolve"}, "changed since"),
        ({"body": b"x" * 100_000}, "times in a row|changed|range|sent"),
    ],
    ids=["etag", "wrong length"],
)
def test_other_failures_end_it_and_leave_no_output(served, tmp_path, fault, text):
    bigload.plan("org/tiny", {"cpu": "1GiB"})
    served.fault(fault.pop("route", "cdn"), file=".safetensors", times=-1, **fault)
    with no_thread_left(), pytest.raises(ReadError, match=text):
        bigload.reshard("org/tiny", tmp_path / "out", threads=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", layouts("ranks", "dat", "cast"))
def test_each_file_of_a_server_without_ranges_is_transferred_once_for_every_layout(served, tmp_path, options):
    bigload.reshard(served.source, tmp_path / "local", **options)
    with served_plainly(served.source) as server:
        with pytest.warns(WholeFilesWarning, match="does not support byte ranges: whole files are read"):
            bigload.reshard(server.url, tmp_path / "remote", threads=4, **options)
        assert weights(tmp_path / "remote") == weights(tmp_path / "local")
        for path in served.source.glob("*.safetensors"):
            assert server.bytes_of(path.name).count(path.stat().st_size) == 1


@pytest.mark.filterwarnings("ignore::bigload.checkpoint.byte_source.WholeFilesWarning")
def test_a_content_network_without_ranges_is_read_as_a_whole(served, tmp_path):
    served.fault("cdn", no_ranges=True, times=-1)
    bigload.reshard("org/tiny", tmp_path / "remote", tp=2)
    bigload.reshard(served.source, tmp_path / "local", tp=2)
    assert weights(tmp_path / "remote") == weights(tmp_path / "local")


@pytest.mark.filterwarnings("ignore::bigload.checkpoint.byte_source.WholeFilesWarning")
def test_a_file_that_is_replaced_on_a_server_without_ranges_ends_it_and_leaves_no_output(served, tmp_path):
    path = served.source / "model-00002-of-00002.safetensors"
    with (
        served_plainly(served.source) as server,
        no_thread_left(),
        pytest.raises(ReadError, match="it was written to while it was read"),
    ):
        bigload.reshard(server.url, tmp_path / "out", on_progress=lambda _: os.utime(path, (1, 1)))
    assert not (tmp_path / "out").exists()


def test_an_output_of_another_commit_is_not_resumed(served, tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "window_bytes", lambda options: 64 * KIB)
    bigload.plan("org/tiny", {"cpu": "1GiB"})
    served.fault("cdn", file="00002-of-00002.safetensors", times=-1, status=403)
    with pytest.raises(AccessDeniedError):
        bigload.reshard("org/tiny", tmp_path / "out", threads=1)
    served.faults.clear()
    shard = served.source / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    served.add("org/tiny", served.source)
    hub._listings.clear()
    for ref in (tmp_path / "cache/bigload/revisions").iterdir():
        ref.unlink()
    with pytest.raises(bigload.OutputExistsError):
        bigload.reshard("org/tiny", tmp_path / "out", resume=True)


def test_the_manifest_names_the_commit(served, tmp_path):
    bigload.reshard("org/tiny", tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / MANIFEST_FILE).read_text())
    assert manifest["source"]["path"].endswith(served.repositories["org/tiny"].commit)


def test_ranks_transfer_their_own_files_only(served, tmp_path):
    bigload.plan("org/tiny", {"cpu": "1GiB"})
    served.requests.clear()
    options = {"max_shard_bytes": 700_000, "threads": 2}
    reports = outcomes(2, lambda team: bigload.reshard("org/tiny", tmp_path / "out", team=team, **options))
    assert [report.out for report in reports] == [tmp_path / "out"] * 2
    assert served.num_bytes < 1.1 * data_bytes(served.source)
    bigload.reshard(served.source, tmp_path / "local", **options)
    assert weights(tmp_path / "out") == weights(tmp_path / "local")


def command(served, tmp_path, *arguments, launcher=(), **environment):
    """Start the program, which takes the server for the Hub."""
    path = os.pathsep.join((str(Path(bigload.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])))
    environment = {**os.environ, **served.environment(tmp_path / "cache"), "PYTHONPATH": path, **environment}
    program = Path(sys.executable).with_name("bigload")
    return subprocess.Popen(
        [*launcher, program, "reshard", "org/tiny", tmp_path / "out", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_does_not_wait_for_the_server(served, tmp_path, number):
    """The server says nothing more; requests would wait ten minutes for it."""
    bigload.plan("org/tiny", {"cpu": "1GiB"})
    is_silent, go_on = threading.Event(), threading.Event()

    def pause():
        is_silent.set()
        go_on.wait(120)

    served.fault("cdn", file=".safetensors", times=-1, pause=pause)
    try:
        process = command(served, tmp_path, HF_HUB_DOWNLOAD_TIMEOUT="600")
        assert is_silent.wait(100)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        go_on.set()
    assert process.returncode == 128 + number, said
    assert not (tmp_path / "out").exists()
    served.faults.clear()
    bigload.reshard("org/tiny", tmp_path / "out", resume=True)
    assert bigload.verify(tmp_path / "out").ok


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--layout", "shards"), ("--tp", "8")], ids=["shards", "ranks"])
def test_memory_does_not_grow_with_the_model(served, tmp_path, options):
    """192 MiB of zeros that take no place on a disk: 128 MiB beside the interpreter are enough for any size."""
    folder = tmp_path / "large"
    folder.mkdir()
    hidden, start, header = 2048, 0, {}
    for layer in range(8):
        for name in ("k", "o", "q"):
            stop = start + 2 * hidden * hidden
            key = f"model.layers.{layer}.self_attn.{name}_proj.weight"
            header[key] = {"dtype": "BF16", "shape": [hidden, hidden], "data_offsets": [start, stop]}
            start = stop
    write_raw(folder / "model.safetensors", header)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) + start)
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": hidden}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 8, **heads}))
    served.hashes = False
    served.add("org/tiny", folder)
    process = command(served, tmp_path, *options, "--json")
    answer, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert json.loads(answer)["peak_bytes"] < (45 + 128) * MIB


@pytest.mark.parametrize("options", [{}, {"dtype": "fp32"}], ids=["as stored", "cast"])
def test_fused_experts_are_assembled_from_the_network(served, tmp_path, options):
    folder = make_mixtral(tmp_path / "mixtral")
    served.add("org/moe", folder)
    bigload.reshard(folder, tmp_path / "local", names="transformers", **options)
    bigload.reshard("org/moe", tmp_path / "remote", names="transformers", **options)
    assert weights(tmp_path / "remote") == weights(tmp_path / "local")


SIZES = {
    f"model.layers.0.{name}": size
    for name, size in {
        "self_attn.q_proj": (1024, 1024),
        "mlp.up_proj": (4096, 1024),
        "mlp.down_proj": (1024, 4096),
    }.items()
}


def _plain(folder):
    """Write 18 MiB, beside which a piece of 64 KiB that is sent before a connection is closed counts little."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    tensors = {f"{name}.weight": torch.rand(size).bfloat16() for name, size in SIZES.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.sample(1)
@pytest.mark.parametrize("scheme", ["fp8-block", "int4-g128", "fp8-channel", "int8"])
def test_numbers_and_their_scales_are_transferred_once(served, tmp_path, scheme):
    _plain(tmp_path / "plain")
    there_and_back = {"plain": bigload.Quantize(scheme), "quantised": bigload.Dequantize()}
    bigload.reshard(tmp_path / "plain", tmp_path / "quantised", transforms=[there_and_back["plain"]])
    for folder, transform in there_and_back.items():
        served.add(f"org/{folder}", tmp_path / folder)
        served.requests.clear()
        bigload.reshard(f"org/{folder}", tmp_path / f"remote-{folder}", transforms=[transform])
        assert served.num_bytes < 1.1 * data_bytes(tmp_path / folder)
        bigload.reshard(tmp_path / folder, tmp_path / f"local-{folder}", transforms=[transform])
        assert weights(tmp_path / f"remote-{folder}") == weights(tmp_path / f"local-{folder}")


def _packed(folder, method):
    """Write two layers of packed integers, or of blocks of MXFP4."""
    draw = partial(torch.randint, generator=torch.Generator().manual_seed(0))
    tensors = {}
    for layer in range(2):
        if method == "mxfp4":
            for name, rows in (("gate_up_proj", 1024), ("down_proj", 512)):
                stem = f"model.layers.{layer}.mlp.experts.{name}"
                tensors[f"{stem}_blocks"] = draw(0, 256, (4, rows, 16, 16), dtype=torch.uint8)
                tensors[f"{stem}_scales"] = draw(110, 130, (4, rows, 16), dtype=torch.uint8)
            continue
        for name, (inputs, outputs) in {"mlp.up_proj": (1024, 2048), "mlp.down_proj": (2048, 1024)}.items():
            stem = f"model.layers.{layer}.{name}"
            packed = (inputs // 8, outputs) if method == "gptq" else (inputs, outputs // 8)
            tensors[f"{stem}.qweight"] = draw(-(2**31), 2**31, packed, dtype=torch.int32)
            tensors[f"{stem}.qzeros"] = draw(-(2**31), 2**31, (inputs // 128, outputs // 8), dtype=torch.int32)
            tensors[f"{stem}.scales"] = torch.rand(inputs // 128, outputs).half()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    settings = {"quant_method": method, "bits": 4, "group_size": 128}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
    return folder


@pytest.mark.parametrize("method", ["gptq", pytest.param("awq", marks=pytest.mark.slow), "mxfp4"])
def test_packed_weights_and_their_scales_are_transferred_once(served, tmp_path, method):
    folder = _packed(tmp_path / "packed", method)
    served.add("org/packed", folder)
    bigload.reshard("org/packed", tmp_path / "remote", transforms=[bigload.Dequantize()])
    assert served.num_bytes < 1.1 * data_bytes(folder)
    bigload.reshard(folder, tmp_path / "local", transforms=[bigload.Dequantize()])
    assert weights(tmp_path / "remote") == weights(tmp_path / "local")


def test_the_base_of_an_adapter_is_transferred_once(served, tmp_path):
    folder, adapter = _plain(tmp_path / "plain"), tmp_path / "adapter"
    adapter.mkdir()
    matrices = {f"{name}.lora_A.weight": torch.rand(8, size[1]) for name, size in SIZES.items()}
    matrices |= {f"{name}.lora_B.weight": torch.rand(size[0], 8) for name, size in SIZES.items()}
    matrices = {f"base_model.model.{name}": tensor for name, tensor in matrices.items()}
    save_file(matrices, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16}))
    served.add("org/plain", folder)
    bigload.reshard("org/plain", tmp_path / "remote", transforms=[bigload.MergeLora(adapter)])
    assert served.num_bytes < 1.1 * data_bytes(folder)
    bigload.reshard(folder, tmp_path / "local", transforms=[bigload.MergeLora(adapter)])
    assert weights(tmp_path / "remote") == weights(tmp_path / "local")


def test_fused_experts_of_the_network_get_their_original_names_back_by_the_file_beside_them(
    served, tmp_path, monkeypatch
):
    folder = make_mixtral(tmp_path / "mixtral")
    bigload.reshard(folder, tmp_path / "fused", names="transformers")
    served.add("org/fused", tmp_path / "fused")
    monkeypatch.setattr(names, "_original_of", None)
    bigload.reshard("org/fused", tmp_path / "back", names="checkpoint")
    expected, found = bigload.load(folder), bigload.load(tmp_path / "back")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("tp", [pytest.param((), marks=pytest.mark.slow), ("--tp", "4")], ids=["shards", "ranks"])
def test_a_kill_at_any_moment_costs_a_few_windows(served, tmp_path, tp):
    """The server kills: before the piece of 64 KiB that is the next in the list, whatever the time."""
    threads, window = 3, 256 * KIB
    options = (*tp, "--io-threads", str(threads), "--max-memory-in-flight", str(3 * threads * window))
    for server in served._servers:  # what waits in buffers of the system counts as sent
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHUNK_BYTES)
    bigload.reshard(served.source, tmp_path / "local", tp=int(tp[1]) if tp else None)
    bigload.plan("org/tiny", {"cpu": "1GiB"})
    served.requests.clear()
    num_killed = 0
    for moment in (12, 60, None):
        pieces = iter(range(1, moment or 1))
        processes = []

        def pause(pieces=pieces, processes=processes, moment=moment):
            if moment and next(pieces, None) is None and processes:
                processes[0].kill()

        served.faults[:] = []
        served.fault("cdn", file=".safetensors", times=-1, pause=pause)
        processes.append(command(served, tmp_path, *options, *(["--resume"] if num_killed else [])))
        _, said = processes[0].communicate(timeout=100)
        if processes[0].returncode == 0:
            break
        assert processes[0].returncode == -signal.SIGKILL, said
        assert not (tmp_path / "out").exists()
        num_killed += 1
    assert num_killed >= 2
    assert weights(tmp_path / "out") == weights(tmp_path / "local")
    assert served.num_bytes <= data_bytes(served.source) + MIB + num_killed * (4 * threads + 1) * window


@pytest.mark.slow
def test_processes_of_torchrun_share_the_transfer(served, tmp_path):
    bigload.plan("org/tiny", {"cpu": "1GiB"})
    served.requests.clear()
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--no-python")
    process = command(served, tmp_path, "--max-shard-size", "700000", launcher=launcher, OMP_NUM_THREADS="1")
    _, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert served.num_bytes < 1.5 * data_bytes(served.source)  # gaps of up to 256 KiB are read over
    bigload.reshard(served.source, tmp_path / "local", max_shard_bytes=700_000)
    assert weights(tmp_path / "out") == weights(tmp_path / "local")
