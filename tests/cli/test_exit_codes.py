"""One meaning for every exit code, and a text that says what to change."""

import errno
import json
import os
import pydoc
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import bigload
from bigload_cli.failures import NOTHING_IS_LEFT, report
from builders import data_for, header_of, make_checkpoint, make_split, write_index, write_raw, write_shard

PROGRAM = Path(sys.executable).with_name("bigload")
PLAN = "bigload plan tiny-llama --overhead 0 -m cuda:0=6MiB,cpu=8MiB -o tiny.json"


@pytest.fixture
def place(run, here):
    """Return the current folder, with a plan, and files that are in the way of something."""
    assert run(PLAN).code == 0
    (here / "taken").mkdir()
    (here / "taken" / "notes.txt").write_text("mine")
    (here / "empty").mkdir()
    make_split(here / "split")
    make_split(here / "split.partial")
    (here / "notes.txt").write_text("mine")
    (here / "notes.json").write_text("mine")
    (here / "other.json").write_text('{"a": 1}')
    plan = json.loads((here / "tiny.json").read_text())
    (here / "newer.json").write_text(json.dumps({**plan, "schema": "bigload.plan/2.0"}))
    (here / "cut.json").write_text((here / "tiny.json").read_text()[:300])
    return here


def contents(folder: Path) -> dict[Path, bytes | int]:
    """Return every path below `folder` with its bytes, or with its size where that is large."""
    sizes = {path: path.stat().st_size for path in folder.rglob("*")}
    return {path: path.read_bytes() if path.is_file() and size < 1e6 else size for path, size in sizes.items()}


USAGE = [
    ("bigload plan tiny-llama --explain", "option '--explain' requires an argument", "bigload plan --help lists"),
    ("bigload plan tiny-llama --hosts 2 -m 80GiB", "hosts is 2", "for example tp 8 and pp 2"),
    ("bigload plan tiny-llama --tp 3 -m 80GiB", "does not divide among 3 ranks", "--tp-rules FILE"),
    ("bigload plan tiny-llama -m cpu=1GiB --context 128k", "'128k' is not a valid int", "write 131072 or 128000"),
    ("bigload isnpect tiny-llama", "'isnpect'", "'inspect'"),
    ("bigload inspect", "PATH"),
    ("bigload inspect tiny-llama too-much", "too-much"),
    ("bigload inspect tiny-llama --tensor", "--tensor", "--tensors"),
    ("bigload inspect tiny-llama --depth 0", "--depth", "0"),
    ("bigload inspect tiny-llama --color blue", "blue", "never"),
    ("bigload inspect nowhere", "nowhere", "no such file or folder"),
    ("bigload inspect org/nowhere", "org/nowhere", "HF_HUB_OFFLINE"),
    ("bigload inspect empty", "empty", "model.safetensors"),
    ("bigload plan tiny-llama", "no memory limits", "-m cuda:0=22GiB"),
    ("bigload plan tiny-llama -m cuda:0=22Gb", '"Gb" means gigabits', "22GiB", "22GB (20.49 GiB)"),
    ("bigload plan tiny-llama -m cuda:0=22G", '"G" has two readings', "22GiB"),
    ("bigload plan tiny-llama -m cuda:0=many", "many", "22GiB"),
    ("bigload plan tiny-llama -m cuda:0=0", "no device that computes"),
    ("bigload plan tiny-llama -m cuda:0=-1GiB", "-1GiB"),
    ("bigload plan tiny-llama -m cuda:0", '"cuda:0"', "DEVICE=SIZE"),
    ("bigload plan tiny-llama -m gpu0=1GiB", '"gpu0"', "cuda:N"),
    ("bigload plan tiny-llama -m cpu=1GiB -m cpu=2GiB", "cpu has two limits"),
    ("bigload plan tiny-llama -m disk=1GiB", "no device that computes"),
    ("bigload plan tiny-llama -m cpu=1GiB,disk=1GiB --no-disk", "--no-disk"),
    ("bigload plan tiny-llama -m cpu=1GiB --policy best", "best", "sequential"),
    ("bigload plan tiny-llama -m cpu=1GiB --fail-if cpu", "offload"),
    ("bigload plan tiny-llama -m cpu=1GiB -o notes.txt", "notes.txt", "not a plan"),
    ("bigload plan tiny-llama -m cpu=1GiB -o other.json", "other.json", "not a plan"),
    ("bigload plan tiny-llama -m cpu=1GiB -o taken", "taken", "not a plan"),
    ("bigload reshard tiny.json", "OUT"),
    ("bigload reshard nowhere.json out", "nowhere.json", "bigload plan"),
    ("bigload reshard taken out", "taken"),
    ("bigload reshard tiny.json taken", "taken", "it exists"),
    ("bigload reshard tiny.json notes.txt", "notes.txt", "it exists"),
    ("bigload reshard tiny.json tiny-llama/out", "inside the source"),
    ("bigload reshard tiny.json out --source nowhere", "nowhere"),
    ("bigload reshard tiny.json out --max-shard-size 2Gb", '"Gb" means gigabits', "2GiB"),
    ("bigload reshard tiny.json out --max-shard-size 0", "--max-shard-size", "more than 0"),
    ("bigload reshard tiny.json out --threads 0", "--threads"),
    ("bigload reshard tiny.json out --layout tower", "--layout", '"tower"', "ranks"),
    ("bigload reshard tiny.json out --verify maybe", "--verify", "'maybe'", "'full'"),
    ("bigload reshard tiny-llama out --layout devices", "--layout", "bigload plan CHECKPOINT"),
    ("bigload reshard tiny-llama out --layout ranks", "--tp is not given"),
    ("bigload reshard tiny-llama out --tp-rules rules.toml", "--tp is not given"),
    ("bigload reshard tiny-llama out --layout shards --tp 2", "--tp is 2", "ranks and vllm, not for shards"),
    ("bigload reshard tiny-llama out --tp 2 --tp-rules nowhere.toml", "nowhere.toml", "colwise"),
    ("bigload reshard tiny-llama out --tp 7", "does not divide among 7 ranks", "2 heads of keys and values"),
    ("bigload reshard tiny-llama out --offload-format dat", "--offload-format", "layout offload, not for shards"),
    ("bigload reshard tiny-llama out --source tiny-llama", "--source", "the source is a checkpoint itself"),
    ("bigload reshard tiny-llama out --quantize int8 --quantize=fp8-block", "--quantize", "given 2 times"),
    ("bigload reshard tiny-llama out --lora-scale 2", "--lora-scale is given 1 time, --lora 0 times"),
    ("bigload reshard tiny.json out --add-prefix x.", "the plan counts tensors as they are stored", "then plan that"),
    ("bigload reshard tiny-llama out --dtype int9", "--dtype", "int9"),
    ("bigload reshard tiny-llama out --dtype int8", "--dtype", "floating-point"),
    ("bigload reshard tiny-llama out --dtype fp8", "--dtype", "8 bits need scales"),
    ("bigload plan tiny-llama -m cpu=1GiB --dtype fp8", "dtype", "8 bits need scales"),
    ("bigload reshard tiny-llama out --keep-fp32 norm", "--keep-fp32", "a dtype"),
    ("bigload reshard tiny.json out --dtype bf16", "--dtype", "the plan counted", "bigload plan CHECKPOINT --dtype"),
    ("bigload reshard tiny-llama out --max-memory-in-flight 3", "--max-memory-in-flight 3", "768.0 KiB or more"),
    ("bigload reshard tiny-llama out --max-memory-in-flight lots", "--max-memory-in-flight"),
    ("bigload reshard nowhere out", "nowhere", "no such file or folder"),
    ("bigload reshard taken out", "taken", "model.safetensors"),
    ("bigload verify", "DIR"),
    ("bigload verify nowhere", "nowhere", "no such file or folder"),
    ("bigload verify notes.txt", "notes.txt", "not a folder"),
    ("bigload verify tiny-llama", "tiny-llama", "bigload-manifest.json", "bigload manifest"),
    ("bigload verify split/cuda-0", "split/cuda-0", "a part of", "bigload verify "),
    ("bigload verify split.partial", "split.partial", "not finished", "--resume"),
    ("bigload verify split --io-threads 0", "--io-threads"),
    ("bigload bench-load tiny-llama --threads 1,none", "1,none", "1,2,4"),
    ("bigload bench-load tiny-llama --runs 0", "--runs"),
    ("bigload bench-load nowhere", "nowhere"),
]


def test_bad_usage_ends_with_2_and_says_what_was_wrong(run, place):
    before = contents(place)
    for command, *words in USAGE:
        done = run(command)
        assert (done.code, done.stdout) == (2, ""), command
        assert done.stderr.startswith("error: "), command
        assert [word for word in words if word not in done.stderr] == [], command
        assert contents(place) == before, command


def test_no_command_at_all_gets_the_help_and_2(run):
    done = run("bigload", env={"COLUMNS": "80"})
    assert (done.code, done.stdout) == (2, "")
    assert "bench-load" in done.stderr
    assert "error:" not in done.stderr


NO = [
    ("bigload plan tiny-llama --overhead 0 -m cuda:0=4MiB,cpu=8MiB --no-disk", "does not fit", "short by", "--no-disk"),
    ("bigload plan llama-70b -m cpu=64GiB,disk=1GiB", "does not fit", "131.42 GiB", "short by"),
    ("bigload plan llama-70b -m cuda:0=1GiB", "does not fit", "cuda:0"),
    ("bigload plan tiny-llama -m cpu=8MiB --context 2048", "does not fit", "a shorter --context takes less"),
    ("bigload plan llama-70b -m 0=1GiB,cpu=64GiB,disk=0", "does not fit", "cuda:0"),
    ("bigload plan tiny-llama --overhead 0 -m cuda:0=6MiB,cpu=8MiB --fail-if disk", "--fail-if disk", "on disk"),
    ("bigload plan tiny-llama --overhead 0 -m cuda:0=6MiB,cpu=1GiB --fail-if offload", "--fail-if offload", "on cpu"),
    ("bigload plan tiny-llama -m cpu=1GiB --fail-if offload", "--fail-if offload", "on cpu"),
]


@pytest.mark.parametrize(("command", "words"), [(command, words) for command, *words in NO])
def test_the_answer_no_is_3_and_writes_no_plan(run, here, command, words):
    done = run(f"{command} -o no.json")
    assert (done.code, done.stdout) == (3, "")
    for word in words:
        assert word in done.stderr, word
    assert not (here / "no.json").exists()


@pytest.mark.parametrize("form", ["", "--json", "-q"])
def test_gpus_that_no_number_of_is_enough_are_3(run, form):
    done = run(f"bigload plan tiny-llama --gpus 1KiB {form}")
    assert done.code == 3
    assert "no number of GPUs of 1.0 KiB holds it" in done.stdout + done.stderr
    assert "the largest module that stays whole is" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "bigload plan tiny-llama --overhead 0 -m cuda:0=6MiB,cpu=1GiB --fail-if disk",
        "bigload plan tiny-llama -m cuda:0=1GiB --fail-if offload",
    ],
)
def test_a_gate_that_holds_lets_the_plan_through(run, command):
    assert run(command).code == 0


def test_following_the_hint_of_a_plan_that_does_not_fit_makes_it_fit(run):
    command = "bigload plan llama-70b -m cuda:0=22GiB -m cuda:1=22GiB -m {} --no-disk"
    refused = run(command.format("cpu=42GiB"))
    advice = refused.stderr.partition("-m ")[2].split(",")[0].split()[0]
    assert advice.startswith("cpu=")
    assert run(command.format(advice)).code == 0


def test_a_hint_never_advises_to_leave_out_the_only_device(run):
    done = run("bigload plan llama-70b -m cpu=1KiB")
    assert done.code == 3
    assert "leave it out" not in done.stderr


# Plans that are not for this


FOREIGN = {
    "bigload reshard other.json out": ["other.json", "schema"],
    "bigload reshard newer.json out": ["newer.json", "2.0", "reads 1.x"],
    "bigload reshard cut.json out": ["cut.json", "not valid JSON"],
    "bigload reshard notes.json out": ["notes.json", "not valid JSON"],
    "bigload inspect newer.json": ["newer.json", "2.0", "reads 1.x"],
    "bigload inspect other.json": ["other.json"],
}


def test_a_foreign_plan_ends_with_4(run, place):
    before = contents(place)
    for command, words in FOREIGN.items():
        done = run(command)
        assert (done.code, done.stdout) == (4, ""), command
        assert [word for word in words if word not in done.stderr] == [], command
        assert contents(place) == before, command


def test_a_plan_for_another_version_of_the_checkpoint_ends_with_4_and_names_every_file(run, here):
    make_checkpoint(here / "model")
    assert run("bigload plan model -m cpu=1GiB -o plan.json").code == 0
    make_checkpoint(here / "model", hidden=16)
    done = run("bigload reshard plan.json out")
    assert (done.code, done.stdout) == (4, "")
    assert "another version of model" in done.stderr
    assert "model-00001-of-00002.safetensors" in done.stderr
    assert "model-00002-of-00002.safetensors" in done.stderr
    assert "hint: make a new plan: bigload plan model" in done.stderr
    assert not (here / "out").exists()


def drop_a_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def drop_the_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


def drop_all_files(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def add_a_byte(folder: Path) -> None:
    with (folder / "model-00002-of-00002.safetensors").open("ab") as file:
        file.write(b"0")


def cut_off(folder: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)


def break_the_header(folder: Path) -> None:
    with (folder / "model-00002-of-00002.safetensors").open("r+b") as file:
        file.seek(8)
        file.write(b"XXX")


CHANGES = {
    drop_a_shard: "model-00002-of-00002.safetensors   missing",
    drop_the_index: "no index",
    drop_all_files: "model-00002-of-00002.safetensors   is gone",
    add_a_byte: "model-00002-of-00002.safetensors   1 bytes after the last tensor",
    cut_off: "model-00002-of-00002.safetensors   the file is cut off",
    break_the_header: "model-00002-of-00002.safetensors   the header does not begin with",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize(
    "command",
    ["reshard plan.json out", "reshard plan.json out --source model", "run model -p hello --plan plan.json"],
)
@pytest.mark.sample(6)
def test_a_plan_whose_files_are_no_longer_valid_is_stale_and_ends_with_4(run, here, change, command):
    folder = make_checkpoint(here / "model")
    assert run("bigload plan model -m cpu=1GiB -o plan.json").code == 0
    change(folder)
    done = run(f"bigload {command}")
    assert (done.code, done.stdout) == (4, "")
    assert "plan.json was made for another version of model" in done.stderr
    assert CHANGES[change] in done.stderr
    assert "hint: " in done.stderr
    assert not (here / "out").exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_plan_for_one_file_that_is_gone_is_stale(run, here, suffix):
    if suffix == ".bin":
        torch.save({"a.weight": torch.ones(4)}, here / "one.bin")
    else:
        write_shard(here / "one.safetensors", {"a.weight": ("U8", [2])})
    assert run(f"bigload plan one{suffix} -m cpu=1GiB -o plan.json").code == 0
    (here / f"one{suffix}").unlink()
    done = run("bigload reshard plan.json out")
    assert done.code == 4
    assert f"one{suffix}   is gone" in done.stderr


def test_a_file_that_the_system_refuses_to_read_makes_no_plan_stale(run, here, monkeypatch):
    make_checkpoint(here / "model")
    assert run("bigload plan model -m cpu=1GiB -o plan.json").code == 0

    def refuse(read, num_bytes: int, file: str):
        raise PermissionError(13, "Permission denied", file)

    monkeypatch.setattr("bigload.checkpoint.formats.safetensors.read_header", refuse)
    done = run("bigload reshard plan.json out")
    assert done.code == 1
    assert "Permission denied" in done.stderr


# Files that are not right


def test_a_shard_that_was_cut_off_ends_with_1_and_both_sizes(run, here):
    shard = make_checkpoint(here / "model") / "model-00002-of-00002.safetensors"
    size = shard.stat().st_size
    os.truncate(shard, size - 100)
    for command in ("bigload inspect model", "bigload plan model -m cpu=1GiB", "bigload bench-load model"):
        done = run(command)
        assert (done.code, done.stdout) == (1, "")
        assert "model-00002-of-00002.safetensors: the file is cut off" in done.stderr
        assert str(size) in done.stderr
        assert str(size - 100) in done.stderr
        assert "hint: download" in done.stderr


def test_a_corrupt_header_ends_with_1(run, here):
    make_checkpoint(here / "model", shards=1)
    write_raw(here / "model" / "model.safetensors", b"{XXX}")
    done = run("bigload inspect model")
    assert (done.code, done.stdout) == (1, "")
    assert "model.safetensors: the header is not valid JSON" in done.stderr


@pytest.mark.parametrize("options", ["", " -q", " --size-only"])
def test_a_folder_that_is_not_what_was_written_ends_with_1_and_names_every_file(run, here, options):
    folder = make_split(here / "split")
    (folder / "cpu" / "model.safetensors").unlink()
    (folder / "config.json").write_text("")
    done = run(f"bigload verify split{options}")
    assert (done.code, done.stdout) == (1, "")
    assert "error: split is not what was written: 2 problems in 2 files\n" in done.stderr
    assert "  cpu/model.safetensors: missing\n" in done.stderr
    assert "  config.json: cut off: 0 bytes, expected " in done.stderr
    assert "hint: " in done.stderr


def test_a_manifest_that_is_none_ends_with_1_and_says_why(run, here):
    folder = make_split(here / "split")
    (folder / "bigload-manifest.json").write_text('{"schema": "bigload.manifest/2.0"}')
    done = run("bigload verify split")
    assert (done.code, done.stdout) == (1, "")
    assert "version 2.0" in done.stderr


def test_names_of_a_hostile_manifest_reach_no_terminal_as_they_are(run, here):
    folder = make_split(here / "split")
    text = (folder / "bigload-manifest.json").read_text()
    (folder / "bigload-manifest.json").write_text(text.replace('"config.json"', '"\\u001b[2Jconfig.json"'))
    done = run("bigload verify split")
    assert done.code == 1
    assert "\x1b" not in done.stderr
    assert "\\x1b[2Jconfig.json: missing" in done.stderr


def test_every_missing_shard_is_named_at_once(run, here):
    folder = make_checkpoint(here / "model", shards=4)
    for number in (2, 3):
        (folder / f"model-{number:05}-of-00004.safetensors").unlink()
    done = run("bigload inspect model")
    assert done.code == 1
    assert "2 problems in 2 files" in done.stderr
    assert done.stderr.count("missing, but named in") == 2


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("../tiny-llama/model-00001-of-00004.safetensors", "leaves the folder of the index"),
        ("sub/../../secret.safetensors", "leaves the folder of the index"),
        ("/etc/passwd", "is an absolute path"),
        ("link.safetensors", "is a link that leaves the folder of the index"),
    ],
)
def test_an_index_that_names_files_elsewhere_ends_with_1_and_says_which_and_why(run, here, file, why):
    folder = here / "hostile"
    folder.mkdir()
    write_shard(here / "secret.safetensors", {"a.w": ("U8", [2])})
    (folder / "link.safetensors").symlink_to(here / "secret.safetensors")
    write_index(folder, {"a.w": file})
    for command in ("bigload inspect hostile", "bigload plan hostile -m cpu=1GiB", "bigload bench-load hostile"):
        done = run(command)
        assert (done.code, done.stdout) == (1, "")
        assert f"'{file}' {why}" in done.stderr
        assert "hint: an index may only name files inside its own folder" in done.stderr


def test_a_plan_that_cannot_be_written_ends_with_1_and_the_reason(run):
    done = run("bigload plan tiny-llama -m cpu=1GiB -o nowhere/plan.json")
    assert (done.code, done.stdout) == (1, "")
    assert "nowhere/plan.json: No such file or directory" in done.stderr


# Interruptions, in a process of their own


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Return the path of a plan for a checkpoint of 120 MB: long enough to be interrupted."""
    folder = tmp_path_factory.mktemp("large")
    tensors = {f"layers.{block}.mlp.w": ("U8", [10_000_000]) for block in range(12)}
    (folder / "model").mkdir()
    path = write_raw(folder / "model" / "model.safetensors", header_of(tensors))
    block = data_for("w", 10_000_000)
    with path.open("ab") as file:  # bytes, for a hole would be read too soon
        file.writelines([block] * len(tensors))
    command = [PROGRAM, "plan", "model", "--overhead", "0", "-m", "cuda:0=48MiB,cpu=48MiB", "-o", "plan.json", "-q"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_in_the_midst_of_writing_keeps_what_is_finished(large, environment, number, code, word):
    """The journal says when: the first file is finished, and others are not."""
    before = sorted(large.rglob("*"))
    # A process that was started in the background ignores SIGINT, and its children would too.
    heeded = signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [PROGRAM, "reshard", "plan.json", "out", "--io-threads", "1", "--max-shard-size", "10MB"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=large, env=environment(), **pipes) as process:
        signal.signal(signal.SIGINT, heeded)
        journal = large / "out.partial" / ".bigload-journal-0.jsonl"
        while not (journal.exists() and b'"complete"' in journal.read_bytes()):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.002)
        process.send_signal(number)
        stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (code, "")
    (kept,) = re.findall(rf"{word}: (\d+) of 12 files (?:is|are) finished and kept in out.partial", stderr)
    assert stderr.endswith("hint: run the same command with --resume to go on\n")
    assert "Traceback" not in stderr
    assert not (large / "out").exists()
    resumed = [*command, "--resume"]
    done = subprocess.run(resumed, cwd=large, capture_output=True, text=True, env=environment(), check=True)
    assert f"found {kept} finished file" in done.stderr
    assert f"kept {kept} file" in done.stdout
    loaded, expected = bigload.load(large / "out"), bigload.load(large / "model")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    assert len(loaded) == len(expected)
    shutil.rmtree(large / "out")
    assert sorted(large.rglob("*")) == before


# Where an interruption comes, and how many of the three files are then kept.
STAGES = {
    "writing.staging._clear": 0,
    "writing.source_files.SourceFiles.check_headers": 0,
    "writing.writer.run_jobs": 3,
    "resharding.execution.write_file": 3,
}


@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_at_any_stage_keeps_what_is_finished_and_nothing_else(run, place, monkeypatch, stage):
    before = contents(place)
    target = f"bigload.layouts.{stage}"
    original = pydoc.locate(target)

    def interrupted(*arguments: object, **options: object):
        original(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(target, interrupted)
    done = run("bigload reshard tiny.json out")
    assert (done.code, done.stdout) == (130, "")
    assert not (place / "out").exists()
    monkeypatch.setattr(target, original)
    if not STAGES[stage]:
        assert done.stderr.endswith("interrupted: nothing half-written was left\n")
        assert contents(place) == before
        assert run("bigload reshard tiny.json out -q").code == 0
        return
    assert "interrupted: 3 of 3 files are finished and kept in out.partial\nhint: " in done.stderr
    refused = run("bigload reshard tiny.json out")
    assert refused.code == 2
    assert "--resume continues it, --force discards it" in refused.stderr
    asked = run("bigload reshard tiny.json out --force")
    assert asked.code == 2
    assert "--force would discard 3 finished files (75 tensors) in out.partial" in asked.stderr
    assert "found 3 finished files (75 tensors)" in run("bigload reshard tiny.json out --resume --dry-run").stdout
    resumed = json.loads(run("bigload reshard tiny.json out --resume --json").stdout)
    assert (resumed["kept_files"], resumed["written_bytes"], resumed["verified"]) == (3, 0, True)
    assert run("bigload verify out -q").code == 0


def test_sigint_while_loading_ends_with_130(run, monkeypatch):
    def interrupt(*_arguments: object, **_options: object):
        raise KeyboardInterrupt

    monkeypatch.setattr("bigload.checkpoint.source.open_checkpoint", interrupt)
    done = run("bigload inspect tiny-llama")
    assert (done.code, done.stdout) == (130, "")
    assert done.stderr.strip() == "interrupted: nothing half-written was left"


INTERRUPTED_IMPORT = """
import sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == sys.argv[1]:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder)
from bigload_cli.app import main
sys.argv = ["bigload", "inspect", sys.argv[2]]
main()
"""


@pytest.mark.parametrize(
    "module",
    ["typer", "bigload.errors", "bigload_cli.failures", "bigload_cli.commands.plan", "bigload.checkpoint.source"],
)
@pytest.mark.sample(2)
def test_ctrl_c_during_imports_is_an_interrupt(module, tmp_path, environment):
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, module, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == f"interrupted: {NOTHING_IS_LEFT}\n"


def test_rules_that_are_too_long_get_one_hint(run, here):
    (here / "rules.toml").write_text("# " + "x" * 2_000_000)
    done = run("bigload reshard tiny-llama out --tp 2 --tp-rules rules.toml")
    assert done.code == 2
    assert done.stderr.startswith("error: cannot read rules rules.toml: more than 1.00 MiB\nhint: ")
    assert done.stderr.count("hint: ") == 1


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory", "torch/ao")])
def test_memory_that_the_system_refuses_anywhere_is_no_unexpected_error(error, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bigload"])
    assert report(error) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert told.startswith(f"error: the system refuses this process more memory ({type(error).__name__}")
    assert "hint: give weights less memory with -m" in told
