"""Verbs as a user types them: plans, dry runs, reshards, and one verb after the other."""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import bigload
from bigload.checkpoint.model import TensorInfo
from builders import make_checkpoint, make_many_experts, make_mixtral, make_split, write_manifest, write_shard
from gguf_files import write_gguf

PROGRAM = Path(sys.executable).with_name("bigload")
PLAN = "bigload plan tiny-llama --overhead 0 -m cuda:0=6MiB,cpu=8MiB -o tiny.json"


@pytest.fixture
def plan(run, here) -> Path:
    assert run(PLAN).code == 0
    return here / "tiny.json"


@pytest.fixture
def mixtral(here) -> Path:
    return make_mixtral(here / "mixtral")


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# inspect


def test_a_checkpoint_can_be_named_by_its_folder_its_index_or_a_file(run, here):
    make_checkpoint(here / "one", shards=1)
    for path in ("tiny-llama", "tiny-llama/", "./tiny-llama", "tiny-llama/model.safetensors.index.json"):
        assert run(f"bigload inspect {path} -q").stdout == "15278592\n"
    assert run("bigload inspect one -q").stdout == run("bigload inspect one/model.safetensors -q").stdout


def test_what_tensors_of_a_torch_file_share_is_told(run, here):
    weight = torch.ones(256)
    torch.save({"embed.weight": weight, "head.weight": weight}, here / "tied.bin")
    assert "in 2 tensors, 2.0 KiB, sharing 1.0 KiB on disk, all F32\n" in run("bigload inspect tied.bin").stdout


def test_depth_unfolds_the_tree_and_json_follows_it(run):
    shallow, deep = (json.loads(run(f"bigload inspect tiny-llama --json --depth {n}").stdout) for n in (1, 5))
    assert {row["depth"] for row in shallow["modules"]} == {0}
    assert max(row["depth"] for row in deep["modules"]) > 2


def test_what_is_not_shown_is_not_made(run, here, monkeypatch):
    make_many_experts(here / "experts")
    made = []
    monkeypatch.setattr(
        "bigload.checkpoint.model.TensorInfo", lambda *fields: made.append(fields) or TensorInfo(*fields)
    )
    shown = run("bigload inspect experts")
    assert shown.code == 0
    assert "layers (10 alike)" in shown.stdout
    assert len(made) < 50, "tensors inside experts are made"


def test_inspecting_a_plan_shows_the_plan(run, plan):
    shown = run("bigload inspect tiny.json")
    assert shown.code == 0
    assert shown.stdout == run("bigload plan tiny-llama --overhead 0 -m cuda:0=6MiB,cpu=8MiB").stdout
    assert json.loads(run("bigload inspect tiny.json --json").stdout) == json.loads(plan.read_text())


def test_inspecting_a_plan_finds_it_however_its_keys_are_ordered(run, plan):
    document = json.loads(plan.read_text())
    plan.write_text(json.dumps({"a": "x" * 300, **document}, sort_keys=True))
    assert run("bigload inspect tiny.json").code == 0


# plan


def test_limits_can_be_repeated_joined_by_commas_or_come_from_the_environment(run):
    options = ["-m cuda:0=6MiB -m cpu=8MiB", "-m cuda:0=6MiB,cpu=8MiB", "--max-memory 0=6MiB --max-memory cpu=8MiB"]
    values = ["cuda:0=6MiB,cpu=8MiB", "cuda:0=6MiB cpu=8MiB"]
    plans = [
        *(run(f"bigload plan tiny-llama --overhead 0 {option} --json") for option in options),
        *(run("bigload plan tiny-llama --overhead 0 --json", env={"BIGLOAD_MAX_MEMORY": value}) for value in values),
    ]
    assert [made.code for made in plans] == [0] * 5
    assert len({made.stdout for made in plans}) == 1


def test_an_option_beats_the_environment(run):
    done = run("bigload plan tiny-llama --overhead 0 -m cpu=1GiB --json", env={"BIGLOAD_MAX_MEMORY": "cuda:0=6MiB"})
    assert [row["device"] for row in json.loads(done.stdout)["devices"]] == ["cpu", "disk"]


def test_the_same_plan_is_the_same_file_to_the_last_byte(run, run_program, here):
    command = "bigload plan llama-70b -m cuda:0=22GiB,cuda:1=22GiB,cpu=64GiB -q -o"
    for seed in ("0", "1"):
        assert run_program(f"{command} {seed}.json", env={"PYTHONHASHSEED": seed}).code == 0
    first = (here / "0.json").read_bytes()
    assert first == (here / "1.json").read_bytes()
    assert run(f"{command} 0.json").code == 0
    assert (here / "0.json").read_bytes() == first


def test_a_plan_replaces_a_plan(run, plan):
    assert run("bigload plan tiny-llama -m cpu=1GiB -o tiny.json").code == 0
    assert json.loads(plan.read_text())["execution_device"] == "cpu"


def test_the_rows_of_a_plan_add_up(run):
    document = json.loads(run("bigload plan llama-70b -m 0=22GiB,1=22GiB,cpu=64GiB --context 8192 --json").stdout)
    for row in document["devices"]:
        if row["budget_bytes"] is not None:
            terms = ("weights", "kv", "logits", "activation", "overhead", "workspace", "free")
            assert row["budget_bytes"] == sum(row[f"{term}_bytes"] for term in terms)
    assert sum(row["weights_bytes"] for row in document["devices"]) == document["checkpoint"]["total_bytes"]


def test_the_least_memory_of_ranks_comes_with_whether_a_limit_does(run):
    ranks = "bigload plan llama-70b --tp 8 --pp 2 --hosts 2 --fits"
    least = run(ranks).stdout
    assert least.startswith("smallest memory per GPU: 16 x 8.8 GiB")
    assert run(f"{ranks} -m 80GiB").stdout == f"llama-70b fits 2 hosts of 8 x 80.00 GiB: TP 8 x PP 2\n{least}"
    assert run(ranks, env={"BIGLOAD_MAX_MEMORY": "cuda:0=5GiB"}).stdout == least
    too_little = run(f"{ranks} -m 5GiB")
    assert (too_little.code, too_little.stdout) == (3, "")
    assert "short by 3.71 GiB" in too_little.stderr


def test_limits_beside_a_question_that_has_none_are_not_passed_over(run):
    done = run("bigload plan tiny-llama --fits -m cuda:0=8GiB")
    assert "warning: --fits says what memory it takes, whatever -m is" in done.stderr
    assert run("bigload plan tiny-llama --fits", env={"BIGLOAD_MAX_MEMORY": "cuda:0=8GiB"}).stderr == ""


def test_without_the_disk_there_is_no_disk_in_the_plan(run):
    document = json.loads(run("bigload plan tiny-llama --overhead 0 -m cuda:0=6MiB,cpu=1GiB --no-disk --json").stdout)
    assert [row["device"] for row in document["devices"]] == ["cuda:0", "cpu"]
    assert "disk" not in document["device_map"].values()


def test_what_a_note_promises_about_the_disk_is_true(run):
    shown = run("bigload plan tiny-llama --overhead 0 -m cuda:0=6MiB,cpu=8MiB").stdout
    advice = next(line for line in shown.splitlines() if "nothing would stay on disk" in line)
    limit = next(word for word in advice.split() if word.startswith("cpu="))
    assert run(f"bigload plan tiny-llama --overhead 0 -m cuda:0=6MiB,{limit} --fail-if disk").code == 0
    assert "GiB" not in limit, "a model of 15 MiB needs no advice in GiB"


def test_figures_of_a_small_model_are_no_zeros(run):
    shown = run("bigload plan tiny-llama --overhead 0 -m cuda:0=6MiB,cpu=8MiB").stdout
    assert " 0.00" not in shown
    assert "0.01 GiB" not in shown


@pytest.mark.parametrize("path", [".", "model.safetensors.index.json", "'../my model[v2]'", "../tiny-llama/"])
def test_the_next_command_that_a_plan_suggests_can_be_run(run, here, monkeypatch, path):
    make_checkpoint(here / "my model[v2]")
    monkeypatch.chdir(make_checkpoint(here / "model"))
    planned = run(f"bigload plan {path} -m cpu=1GiB -o ../plan.json")
    assert planned.code == 0
    suggested = planned.stderr.partition("Next: ")[2].strip()
    verb, plan, out = shlex.split(suggested)[1:]
    assert (verb, plan) == ("reshard", "../plan.json")
    assert out.strip("./") not in {"", "split"}
    if path != "." and not path.startswith("model."):  # those two would be written into the source
        done = run(f"{suggested} --dry-run")
        assert (done.code, done.stderr) == (0, "")


def test_the_next_command_for_a_linked_checkpoint_stays_here(run, here):
    (here / "elsewhere").mkdir()
    (here / "tiny-llama").rename(here / "elsewhere" / "model")
    (here / "linked").symlink_to(here / "elsewhere" / "model")
    done = run("bigload plan linked -m cpu=1GiB -o plan.json")
    assert shlex.split(done.stderr)[-1].removeprefix("./") == "linked.split"


# reshard, and what comes after


@pytest.mark.parametrize(
    "what",
    [
        "tiny.json",
        "tiny-llama",
        "tiny-llama --max-shard-size 3MB",
        "tiny-llama --tp 2",
        "tiny-llama --layout offload",
        "tiny-llama --layout offload --offload-format dat",
    ],
)
@pytest.mark.sample(3)
def test_a_dry_run_names_every_file_and_writes_nothing(run, plan, here, what):
    before = names(here)
    done = run(f"bigload reshard {what} out --dry-run")
    assert done.code == 0
    assert names(here) == before
    assert "nothing was written" in done.stdout
    _, table, _ = done.stdout.split("\n\n")
    assert run(f"bigload reshard {what} out -q").code == 0
    written = {name for name in names(here / "out") if (here / "out" / name).is_file()}
    assert {line.split()[0] for line in table.splitlines()[1:]} == written


@pytest.mark.parametrize(
    "what", ["reshard tiny-llama out", "reshard llama-70b out --dtype fp32", "fetch tiny-llama out"]
)
def test_a_dry_run_answers_without_the_room_that_a_run_needs(run, here, monkeypatch, what):
    usage = shutil.disk_usage(here)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1024))
    plain, document, quiet = (run(f"bigload {what} --dry-run {option}") for option in ("", "--json", "-q"))
    assert "1.0 KiB free there" in plain.stdout
    assert plain.stdout.endswith("dry run: nothing was written\n")
    assert json.loads(document.stdout)["free_bytes"] == 1024
    assert quiet.stdout == "out\n"
    for done in (plain, document, quiet):
        assert done.code == 3
        assert re.fullmatch(r"warning: not enough space for out: .+ to write, 1.0 KiB free; short by .+\n", done.stderr)
    done = run(f"bigload {what} --force")
    assert (done.code, done.stdout) == (1, "")
    assert "error: not enough space for out: " in done.stderr
    assert names(here).isdisjoint({"out", "out.partial"})


def test_resharding_for_stages_says_which_ranks_are_the_first(run):
    done = run("bigload reshard tiny-llama out --tp 2 --pp 4 --dry-run")
    assert "4 stages of 2 ranks, one after another: rank-0 to rank-1 are the first\n" in done.stdout
    assert "stages of" not in run("bigload reshard tiny-llama out --tp 2 --dry-run").stdout


def test_one_verb_follows_the_other(run, plan, here):
    done = run("bigload reshard tiny.json out")
    assert done.code == 0
    assert "every byte read back and equal to the source" in done.stdout
    assert {"cuda-0", "cpu", "offload", "plan.json", "config.json", "model.safetensors.index.json"} <= names(
        here / "out"
    )
    assert not (here / "out.partial").exists()
    assert run("bigload inspect out -q").stdout == "15278592\n"
    assert run("bigload inspect out/cuda-0").code == 0
    made, planned = (json.loads(run(f"bigload inspect {file} -j").stdout) for file in ("out/plan.json", "tiny.json"))
    assert made["device_map"] == planned["device_map"]
    assert run("bigload verify out").code == 0
    measured = run("bigload bench-load out --runs 1 --threads 1,2")
    assert measured.code == 0
    assert "All strategies loaded identical bytes" in measured.stdout
    assert run("bigload plan out -m cpu=1GiB").code == 0
    assert run("bigload reshard tiny.json again --source out -q").code == 4
    assert run("bigload reshard out/plan.json again -q").code == 0


NEXT = {
    "tiny.json": ("devices", "bigload bench-load out"),
    "tiny-llama": ("shards", "bigload bench-load out"),
    "tiny-llama --tp 2": ("ranks", "in Python, on rank r: bigload.load(f'out/rank-{r}')"),
    "tiny-llama --layout offload": ("offload", "in Python: bigload.OffloadFolder.open('out')"),
    "tiny-llama --layout offload --offload-format dat": (
        "offload",
        "in Python: accelerate.disk_offload(model, 'out')",
    ),
    "tiny.json --layout offload --offload-format dat": (
        "offload",
        "in Python: accelerate.dispatch_model(model, device_map, offload_dir='out')",
    ),
}


@pytest.mark.parametrize("what", NEXT)
def test_every_layout_says_what_it_is_for_and_how_it_is_read(run, plan, what):
    layout, command = NEXT[what]
    done = run(f"bigload reshard {what} out")
    assert done.code == 0
    assert f"\n{layout}: " in done.stderr
    assert done.stdout.splitlines()[-1] == f"Next: {command}"


@pytest.mark.usefixtures("here")
def test_what_is_said_to_do_in_python_works(run):
    said = run("bigload reshard tiny-llama 'o{u}t' --tp 2").stdout.splitlines()[-1].partition(": bigload.")[2]
    assert set(eval(f"bigload.{said}", {"bigload": bigload, "r": 1})) == set(bigload.load("tiny-llama"))
    said = (
        run("bigload reshard tiny-llama offloaded --layout offload").stdout.splitlines()[-1].partition(": bigload.")[2]
    )
    assert set(eval(f"bigload.{said}").tensors) == set(bigload.load("tiny-llama"))


def test_weights_are_cast_and_what_becomes_infinite_is_told(run, here):
    weights = {"a.weight": torch.tensor([1.0, 1e30, 70_000.0]), "b.weight": torch.ones(4), "norm.weight": torch.ones(2)}
    weights["ids"] = torch.arange(4)
    (here / "wide").mkdir()
    torch.save(weights, here / "wide" / "pytorch_model.bin")
    done = run("bigload reshard wide out --dtype fp16 --keep-fp32 norm")
    assert done.code == 0
    assert "cast to F16, but to F32 what matches norm" in done.stderr
    assert "note: 1 tensor not cast: not floating-point, ids for one" in done.stderr
    assert "warning: a.weight: 2 values beyond the largest of F16" in done.stderr
    assert "every byte read back and equal to the source, cast" in done.stdout
    loaded = bigload.load("out")
    assert {name: tensor.dtype for name, tensor in loaded.items()} == {
        "a.weight": torch.float16,
        "b.weight": torch.float16,
        "ids": torch.int64,
        "norm.weight": torch.float32,
    }
    again = json.loads(run("bigload reshard wide again --dtype fp16 --json").stdout)
    assert again["overflows"] == {"a.weight": 2}
    assert (again["options"]["dtype"], again["options"]["keep_fp32"]) == ("F16", [])


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--verify none", "not verified (--verify none)"),
        ("--verify size", "every file has its size, nothing was read back (--verify size)"),
        ("--verify full", "every byte read back and equal to the source"),
    ],
)
def test_how_it_was_verified_is_said(run, option, words):
    assert f"75 tensors: {words}\n" in run(f"bigload reshard tiny-llama out {option}").stdout


def test_one_file_is_made_on_request(run, here):
    done = run("bigload reshard tiny-llama out --max-shard-size none -q")
    assert (done.code, done.stdout) == (0, "out\n")
    assert {name for name in names(here / "out") if "safetensors" in name} == {"model.safetensors"}


@pytest.mark.parametrize("option", ["--io-threads 1", "--threads 1", "--max-memory-in-flight 1MiB"])
def test_threads_and_memory_change_nothing_that_is_written(run, here, option):
    assert run("bigload reshard tiny-llama usual -q").code == 0
    assert run(f"bigload reshard tiny-llama out -q {option}").code == 0
    assert {name: (here / "usual" / name).read_bytes() for name in names(here / "usual")} == {
        name: (here / "out" / name).read_bytes() for name in names(here / "out")
    }


# --force


def test_replacing_an_output_needs_a_yes_where_nobody_can_be_asked(run, here):
    assert run("bigload reshard tiny-llama out -q").code == 0
    before = {name: (here / "out" / name).stat().st_ino for name in names(here / "out")}
    done = run("bigload reshard tiny-llama out --force --max-shard-size 3MB")
    assert (done.code, done.stdout) == (2, "")
    assert "--force would replace out (14.59 MiB)\nhint: add --yes" in done.stderr
    assert {name: (here / "out" / name).stat().st_ino for name in names(here / "out")} == before
    assert run("bigload reshard tiny-llama out --force --max-shard-size 3MB --dry-run").code == 0
    assert {name: (here / "out" / name).stat().st_ino for name in names(here / "out")} == before
    assert run("bigload reshard tiny-llama out --force -y --max-shard-size 3MB").code == 0
    assert "model.safetensors.index.json" in names(here / "out")
    assert [path.name for path in here.glob("out?*")] == []


def test_force_asks_nothing_where_it_destroys_nothing(run):
    assert run("bigload reshard tiny-llama out --force -q").code == 0


def test_force_never_replaces_what_bigload_has_not_written(run, here):
    (here / "out").mkdir()
    (here / "out" / "notes.txt").write_text("mine")
    done = run("bigload reshard tiny-llama out --force --yes")
    assert (done.code, done.stdout) == (2, "")
    assert names(here / "out") == {"notes.txt"}


ANSWERS = {"y\n": 0, "n\n": 1, "\x04": 130}  # the last is Ctrl-D


@pytest.mark.sample(2)
@pytest.mark.parametrize("answer", ANSWERS)
def test_on_a_terminal_force_asks_once(run, here, environment, terminal, answer):
    open_terminal, read_terminal = terminal
    assert run("bigload reshard tiny-llama out -q").code == 0
    keyboard, screen = open_terminal(200)
    command = [PROGRAM, "reshard", "tiny-llama", "out", "--force", "--max-shard-size", "3MB"]
    with subprocess.Popen(command, stdin=screen, stdout=screen, stderr=screen, env=environment()) as process:
        os.close(screen)
        shown = b""
        while b"[y/N]" not in shown:
            shown += (more := read_terminal(keyboard))
            assert more, shown.decode()
        os.write(keyboard, answer.encode())
        while more := read_terminal(keyboard):
            shown += more
    os.close(keyboard)
    assert process.returncode == ANSWERS[answer]
    assert shown.count(b"Replace out (14.59 MiB)? [y/N]") == 1
    assert ("model.safetensors.index.json" in names(here / "out")) == (answer == "y\n")
    assert b"unexpected" not in shown
    assert (b"nothing was changed" in shown) == (answer == "n\n")


# Several processes


def test_of_a_team_of_processes_the_first_speaks(run, monkeypatch):
    class Second:
        rank, size = 1, 2

        def all_gather(self, value):
            return [value, value]

    monkeypatch.setattr("bigload.distributed.joining.launched_process_group", lambda: contextlib.nullcontext(Second()))
    for options in ("", "--json", "-q"):
        done = run(f"bigload reshard tiny-llama out --dry-run {options}")
        assert (done.code, done.stdout, done.stderr) == (0, "", "")


# --resume


def test_resuming_what_is_finished_says_so_and_reads_nothing_back(run):
    assert run("bigload reshard tiny-llama out -q").code == 0
    done = run("bigload reshard tiny-llama out --resume")
    assert done.code == 0
    assert done.stdout == "nothing to do: 1 file, 14.58 MiB, was finished before\nNext: bigload verify out\n"
    document = json.loads(run("bigload reshard tiny-llama out --resume --json").stdout)
    assert (document["kept_files"], document["written_bytes"], document["verified"]) == (1, 0, False)
    assert run("bigload reshard tiny-llama out --resume --max-shard-size 3MB").code == 2


def test_layers_that_the_plan_leaves_out_are_named_and_not_counted_as_written(run, here):
    folder = make_checkpoint(here / "extra", blocks=4, shards=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}))
    assert run("bigload plan extra -m cpu=1MiB -o extra.json").code == 0
    done = run("bigload reshard extra.json split")
    (said,) = (line for line in done.stderr.splitlines() if "leaves it out" in line)
    assert "model.layers.3" in said
    written = json.loads(run("bigload inspect split --json").stdout)["num_tensors"]
    assert written < json.loads(run("bigload inspect extra --json").stdout)["num_tensors"]
    assert f"{written} tensors: every byte read back" in done.stdout
    assert "model.layers.3" in run("bigload reshard extra.json again --dry-run").stdout


def test_a_wait_too_short_to_tell_is_no_lower_bound(run, here):
    make_checkpoint(here / "small")
    done = run("bigload plan small --overhead 0 -m cuda:0=4KiB,cpu=1MiB")
    assert "that is under 1 ms" in done.stdout


def test_a_config_that_cannot_be_read_is_not_said_to_be_missing(run, here):
    (make_checkpoint(here / "small") / "config.json").write_text("{")
    done = run("bigload plan small -m cpu=1MiB --context 10")
    assert "there is no config.json" not in done.stdout
    assert "no config.json could be read" in done.stdout


def test_resharding_says_nothing_on_stderr_but_progress(run, plan):
    done = run("bigload reshard tiny.json out --json")
    assert done.code == 0
    assert "error" not in done.stderr
    assert json.loads(done.stdout)["verified"] is True


def test_resharding_into_an_empty_folder_is_fine_and_into_a_full_one_is_not(run, plan, here):
    (here / "out").mkdir()
    assert run("bigload reshard tiny.json out -q").code == 0
    before = {path: path.read_bytes() for path in (here / "out").rglob("*") if path.is_file()}
    assert run("bigload reshard tiny.json out -q").code == 2
    assert {path: path.read_bytes() for path in (here / "out").rglob("*") if path.is_file()} == before


def test_max_shard_size_bounds_the_files(run, plan):
    document = json.loads(run("bigload reshard tiny.json out --max-shard-size 3MB --json --verify none").stdout)
    assert document["verified"] is False
    assert len(document["files"]) > 3
    assert max(file["total_bytes"] for file in document["files"]) <= 3_010_000


def test_a_plan_finds_its_checkpoint_beside_itself(run, plan, here, monkeypatch):
    monkeypatch.chdir("/")
    assert run(f"bigload reshard {plan} {here}/out --dry-run").code == 0


@pytest.mark.slow
def test_loading_serially_and_in_parallel_is_shown_side_by_side(run):
    done = run("bigload bench-load tiny-llama --runs 2 --threads 1,2")
    assert done.code == 0
    rows = [line for line in done.stdout.splitlines() if line.startswith(("auto, 1 thread  ", "auto, 2 threads  "))]
    assert len(rows) == 2
    assert "identical bytes" in done.stdout


# verify


def test_verify_says_that_all_is_well_and_how_it_knows(run, here):
    make_split(here / "split")
    done = run("bigload verify split")
    assert (done.code, done.stderr) == (0, "")
    assert "2 tensors: every byte is as it was written (xxh3-128)" in done.stdout
    quiet = run("bigload verify split -q")
    assert (quiet.code, quiet.stdout, quiet.stderr) == (0, "split\n", "")
    assert "not read" in run("bigload verify split --size-only").stdout


def test_verify_says_which_files_it_could_not_judge_and_which_are_too_many(run, here):
    folder = make_split(here / "split")
    manifest = json.loads((folder / "bigload-manifest.json").read_text())
    record = manifest["files"]["cpu/model.safetensors"]
    record["digest"], record["tensors"] = None, dict.fromkeys(record["tensors"])
    (folder / "bigload-manifest.json").write_text(json.dumps(manifest))
    (folder / "more.safetensors").touch()
    done = run("bigload verify split")
    assert done.code == 0
    assert "1 tensor: every byte" in done.stdout
    assert "1 file, " in done.stdout
    assert "cloned and never read" in done.stdout
    assert done.stderr.startswith("warning: more.safetensors: not named in bigload-manifest.json")


def test_verify_tells_of_holes(run, here):
    (here / "split").mkdir()
    with (here / "split" / "w.dat").open("wb") as file:
        file.truncate(2**20)
    write_manifest(here / "split")
    assert "1.00 MiB (0 B without holes)" in run("bigload verify split").stdout


def test_verify_shows_a_bar_on_a_terminal(run_on_terminal, here):
    make_split(here / "split")
    shown = run_on_terminal("bigload verify split", 120)
    assert shown.code == 0
    assert "every byte is as it was written" in shown.stdout
    assert "\x1b[?25l" in shown.stdout  # the cursor is hidden while a bar is drawn


# What a start costs


def quantised(folder: Path) -> Path:
    folder.mkdir()
    tensors = {
        "model.embed_tokens.weight": ("F16", [1000, 64]),
        "model.layers.0.q_proj.qweight": ("I32", [64, 8]),
        "model.layers.0.q_proj.qzeros": ("I32", [1, 8]),
        "model.layers.0.q_proj.scales": ("F16", [1, 64]),
    }
    write_shard(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq", "bits": 4}}))
    return folder


def test_a_quantised_checkpoint_is_named_by_inspect_and_plan(run, here):
    quantised(here / "awq")
    shown = run("bigload inspect awq").stdout
    assert "64.58 K packed values, about 68.1 K parameters in 4 bits (AWQ), in 4 tensors" in shown
    document = json.loads(run("bigload inspect awq --json").stdout)
    assert document["quantisation"] == {"method": "AWQ", "bits": 4, "num_parameters": 68096}
    assert "note: weights are quantised, 4 bits (AWQ)" in run("bigload plan awq -m cpu=1GiB").stdout


@pytest.mark.parametrize("verb", ["inspect {}", "plan {} -m cpu=1GiB", "reshard {} out", "bench-load {}"])
def test_every_verb_names_what_it_does_not_read(run, here, verb):
    (here / "model.onnx").write_bytes(b"\x08\x07")
    done = run(f"bigload {verb.format('model.onnx')}")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: model.onnx cannot be read: it is an ONNX graph\nhint: ")


def test_reshard_of_gguf_asks_for_a_dtype(run, here):
    write_gguf(here / "model.gguf", {"a.weight": (12, (256,)), "b.weight": (12, (64, 256))})
    done = run("bigload reshard model.gguf out")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --dtype is not given; expected one to write quantised weights in\nhint: add ")
    assert run("bigload reshard model.gguf out --dtype bf16").code == 0
    assert "2 tensors" in run("bigload inspect out").stdout


@pytest.mark.parametrize("verb", ["bench-load {}", "fetch {} out --only a"])
def test_verbs_that_need_data_of_gguf_refuse_it(run, here, verb):
    write_gguf(here / "model.gguf", {"a.weight": (12, (256,)), "b.weight": (12, (64, 256))})
    done = run(f"bigload {verb.format('model.gguf')}")
    assert (done.code, done.stdout) == (2, ""), done.stderr
    assert "error: model.gguf cannot be read: of GGUF files only headers are read, not data\nhint: " in done.stderr
    assert not (here / "out").exists()


@pytest.mark.parametrize("verb", ["inspect {}", "plan {} -m cpu=1GiB", "reshard {} out --dry-run --layout shards"])
def test_every_verb_says_that_an_adapter_is_no_model(run, here, verb):
    (here / "lora").mkdir()
    write_shard(here / "lora" / "adapter_model.safetensors", {"q_proj.lora_A.weight": ("F32", [8, 4])})
    (here / "lora" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    done = run(f"bigload {verb.format('lora')}")
    assert done.code == 0
    assert "warning: this is a LoRA adapter of rank 8 for a base model" in done.stderr
    assert "bigload plan lora" not in done.stdout


# reshard --names


@pytest.mark.usefixtures("mixtral")
def test_a_dry_run_says_what_is_fused(run, run_on_terminal, here):
    words = "names of transformers' models: 12 tensors, 2 of them made of 12 stored ones"
    shown = run_on_terminal("bigload reshard mixtral out --names transformers --dry-run")
    assert shown.code == 0
    assert words in " ".join(shown.stdout.split())
    assert "bigload-conversion.json" in shown.stdout
    assert not (here / "out").exists()
    done = run("bigload reshard mixtral out --names transformers")
    assert f"note: {words}\n" in done.stderr
    assert "12 tensors: every byte read back and equal to the source\n" in done.stdout
    assert run("bigload verify out").code == 0
    assert run("bigload reshard out back --names checkpoint -q").code == 0
    stored = [json.loads(run(f"bigload inspect {folder} --json").stdout)["tensors"] for folder in ("mixtral", "back")]
    assert stored[0] == stored[1]


def test_names_that_cannot_be_had_are_an_error_with_a_hint(run_on_terminal, mixtral):
    done = run_on_terminal("bigload reshard mixtral out --tp 2 --names transformers")
    assert done.code == 2
    text = " ".join(done.stdout.split())
    assert "expected none with the layout ranks, whose rules go by the stored names" in text
    assert "hint: write the checkpoint under other names first: bigload reshard CHECKPOINT OUT --names" in text
    (mixtral / "config.json").unlink()
    done = run_on_terminal("bigload reshard mixtral out --names transformers")
    assert done.code == 3
    text = " ".join(done.stdout.split())
    if find_spec("transformers") is None:
        assert "what transformers calls the modules is not known: the config names no model_type hint: leave" in text
    else:  # which is asked about classes that no table knows
        assert "does not build the model of mixtral" in text
        assert "hint: config.json beside the weights names the class, under architectures" in text


def test_plan_prints_only_what_another_program_takes(run, here):
    make_checkpoint(here / "m", blocks=2)
    done = run("bigload plan m -m 0=1GiB,cpu=1GiB --emit llama.cpp -o plan.json")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.startswith("-ngl 3 -ot '^(blk")
    assert done.stdout.count("\n") == 1
    assert (here / "plan.json").exists()


def test_diff_ends_with_1_where_something_differs(run, here):
    make_checkpoint(here / "m", blocks=30)
    assert run("bigload reshard m other --layout shards --rename 's/layers.0/layers.99/'").code == 0
    assert run("bigload reshard m same --max-shard-size 1KB").code == 0
    equal = run("bigload diff m same")
    assert (equal.code, equal.stdout.count("\n")) == (0, 1)
    assert "no difference; read " in equal.stdout
    other = run("bigload diff m other")
    assert other.code == 1
    assert "only in m: " in other.stdout
    assert "only in other: " in other.stdout
    assert run("bigload reshard m renamed --add-prefix x.").code == 0
    assert "  model.layers.*.input_layernorm.weight (30)\n" in run("bigload diff m renamed").stdout
    assert (run("bigload diff m same -q").stdout, run("bigload diff m other -q").code) == ("", 1)
    document = json.loads(run("bigload diff m other --json").stdout)
    assert document["schema"] == "bigload.diff/1.0"
    assert document["equal"] is False
    assert len(document["only_first"]) == len(document["only_second"]) > 0
    assert run("bigload diff m nothing").code == 2
    assert run("bigload reshard m wide --dtype fp32").code == 0
    folded = run("bigload diff m wide")
    assert folded.code == 1
    assert "model.layers.*.input_layernorm.weight (30)" in folded.stdout
    assert "BF16 -> F32" in folded.stdout
