"""`bigload fetch` as people and programs see it."""

import json

import pytest

from bigload.checkpoint.records.manifest import MANIFEST_FILE
from builders import contents


def test_a_fetch_says_what_it_does_and_what_to_do_next(run, here):
    done = run("bigload fetch tiny-llama out")
    assert done.code == 0
    assert "tiny-llama -> out" in done.stderr
    assert "to transfer in 6 byte ranges; 6 files, " in done.stderr
    assert "6 files: every byte read back and equal to what came" in done.stdout
    assert "Next: bigload plan out -m auto" in done.stdout
    assert {name for name in contents(here / "out") if name != MANIFEST_FILE} == set(contents(here / "tiny-llama"))
    again = run("bigload fetch tiny-llama out")
    assert (again.code, again.stdout.splitlines()[0][:13]) == (0, "nothing to do")
    checked = run("bigload verify out")
    assert (checked.code, checked.stdout.splitlines()[1]) == (0, "6 files: every byte is as it was written (xxh3-128)")
    assert "6 files: not read" in run("bigload verify out --size-only").stdout


def test_a_dry_run_lists_the_files_and_writes_nothing(run, here):
    done = run("bigload fetch tiny-llama out --only model.layers.0 --dry-run")
    assert done.code == 0
    assert "a part of tiny-llama, 9 of " in done.stdout
    assert "bigload-part.json" in done.stdout
    assert done.stdout.endswith("dry run: nothing was written\n")
    assert not list(here.glob("out*"))


def test_a_rank_is_told_why_it_transfers_more_than_it_writes(run):
    done = run("bigload fetch tiny-llama out --rank 0 --tp 2 --dry-run")
    assert "2.46 MiB more than is written: of tensors divided by columns, whole rows are transferred" in done.stdout
    assert "bigload reshard MODEL OUT --tp 2" in done.stdout
    assert "more than is written" not in run("bigload fetch tiny-llama out --only lm_head --dry-run").stdout


def test_a_module_that_is_misspelled_is_close_to_a_module(run):
    assert (
        "hint: close to model.layes.1 are model.layers.1"
        in run("bigload fetch tiny-llama out --only model.layes.1").stderr
    )


def test_quiet_prints_the_folder_alone(run):
    assert run("bigload fetch tiny-llama out -q --only lm_head").stdout == "out\n"


def test_inspect_says_that_a_part_is_one(run):
    assert run("bigload fetch tiny-llama out -q --only lm_head").code == 0
    shown = run("bigload inspect out")
    assert shown.code == 0
    assert "this is a part of tiny-llama, 1 of " in shown.stdout + shown.stderr


def test_an_output_is_replaced_only_with_force_and_yes(run, here):
    assert run("bigload fetch tiny-llama out -q").code == 0
    refused = run("bigload fetch tiny-llama out --only lm_head")
    assert (refused.code, refused.stdout) == (2, "")
    assert "--force" in refused.stderr
    asked = run("bigload fetch tiny-llama out --only lm_head --force")
    assert asked.code == 2
    assert "add --yes" in asked.stderr
    assert run("bigload fetch tiny-llama out --only lm_head --force --yes -q").code == 0
    assert (here / "out" / "bigload-part.json").exists()


USAGE = [
    ("--rank 3 --tp 2", "--rank is 3", "0 to 1, of 2 ranks"),
    ("--rank 1", "--tp is not given", "which rank goes with"),
    ("--device cpu", "--plan is not given"),
    ("--plan nowhere.json --device cpu", "nowhere.json"),
    ("--only nothing", "--only is", "nothing"),
    ("--only lm_head --rank 0 --tp 2", "nothing beside only"),
    ("--max-memory-in-flight 3", "--max-memory-in-flight 3"),
    ("--io-threads 0", "--io-threads"),
]


@pytest.mark.parametrize(("options", "texts"), [(options, texts) for options, *texts in USAGE])
def test_bad_usage_is_named_by_its_option(run, here, options, texts):
    done = run(f"bigload fetch tiny-llama out {options}")
    assert (done.code, done.stdout) == (2, "")
    assert all(text in done.stderr for text in texts), done.stderr
    assert not list(here.glob("out*"))


def test_a_plan_that_is_stale_is_no_plan_for_this_model(run, here):
    assert run("bigload plan tiny-llama -m cpu=1GiB -o tiny.json").code == 0
    assert run("bigload reshard tiny-llama other --max-shard-size 1MB -q").code == 0
    assert run("bigload fetch other out --plan tiny.json --device cpu").code == 4


def test_a_failure_is_one_json_document(run):
    document = json.loads(run("bigload fetch nowhere out --json").stdout)
    assert (document["code"], document["exit_code"]) == ("checkpoint-not-found", 2)
