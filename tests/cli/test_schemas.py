"""Output of `--json` and `-o` agrees with docs/schemas/, to the last key."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jsonschema import Draft202012Validator
from safetensors.torch import save_file

from bigload.checkpoint.records.fingerprint import ShardFingerprint
from bigload.checkpoint.records.manifest import FileRecord, Manifest, ManifestSource, manifest_lines
from bigload.machine.profiles.machine_profile import DeviceProfile, MachineProfile
from bigload.planning.expert_stats import ExpertStats
from builders import make_checkpoint, make_pipeline, make_split, record_of, write_shard

VERSIONS = {"plan": "1.2", "inspect": "1.3", "reshard": "1.1", "bench-load": "1.1", "profile": "1.2"}
SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"
QUESTIONS = ["explain", "compare", "fits", "gpus", "max-context"]
NAMES = [
    "plan",
    "inspect",
    "fetch",
    "part",
    "delta",
    "diff",
    "reshard",
    "manifest",
    "manifest-made",
    "ranks",
    "offload",
    "verify",
    "bench-load",
    "run",
    "expert-stats",
    "profile",
    "error",
    *QUESTIONS,
    "parallel-plan",
    "parallel-fits",
    "parallel-explain",
]

PLAN = "bigload plan tiny-llama --overhead 0 -m cuda:0=6MiB,cpu=8MiB -o tiny.json"
COMMANDS = [
    "bigload inspect llama-70b --json",
    "bigload inspect tiny-llama --json --tensors --shards --depth 9",
    "bigload inspect tiny-llama/model-00002-of-00004.safetensors --json",
    "bigload inspect empty.safetensors --json",
    "bigload inspect pipeline --json",
    "bigload inspect torch.bin --json --tensors --shards",
    "bigload inspect tiny.json --json",
    "bigload plan llama-70b -m cuda:0=22GiB,cuda:1=22GiB,cpu=64GiB --json",
    "bigload plan tiny-llama -m cpu=1GiB --no-disk --json",
    "bigload plan tiny-llama --overhead 0 -m cuda:0=4MiB,cpu=1GiB,disk=1GiB --json",
    "bigload plan llama-70b -m 0=22GiB,1=22GiB,cpu=64GiB --explain lm_head --json",
    "bigload plan llama-70b -m 0=22GiB,1=22GiB,cpu=64GiB --compare sequential --json",
    "bigload plan llama-70b -m 0=80GiB,1=80GiB --max-context --json",
    "bigload plan llama-70b --fits --context 8192 --json",
    "bigload plan llama-70b --gpus 24GiB --json",
    "bigload plan llama-70b --tp 8 --pp 2 --hosts 2 -m 80GiB --max-context --json",
    "bigload fetch llama-70b out --dry-run --json --only lm_head",
    "bigload fetch tiny-llama out --json --exclude '*.txt'",
    "bigload fetch tiny-llama out --json --only 'model.layers.0' --only lm_head",
    "bigload fetch tiny-llama out --json --rank 1 --tp 2",
    "bigload fetch tiny-llama out --json --plan tiny.json --device cuda:0 --device cpu",
    "bigload reshard tiny.json out --dry-run --json",
    "bigload reshard tiny.json out --json",
    "bigload reshard tiny.json out --json --verify none",
    "bigload reshard tiny-llama out --json --max-shard-size none --verify size",
    "bigload reshard tiny-llama out --json --dtype fp16 --keep-fp32 '*norm*'",
    "bigload reshard torch.bin out --json --layout offload --offload-format dat",
    "bigload reshard tiny-llama out --json --tp 2 --dry-run",
    "bigload manifest tiny-llama --json",
    "bigload verify split --json",
    "bigload verify split --size-only --json",
    "bigload bench-load tiny-llama --runs 2 --threads 1,2 --json",
    "bigload bench-load tiny-llama --runs 1 --threads 1 --json",
    "bigload bench-load tiny-llama --runs 1 --threads 1 --method mmap,direct --cold --max-inflight 8MiB --json",
    "bigload bench-load tiny-llama --runs 1 --threads 2 --dtype fp32 --warm --json",
]
PARALLEL = {
    "parallel-plan": "bigload plan llama-70b --tp 8 --pp 2 --hosts 2 -m 80GiB --context 1000 --json",
    "parallel-fits": "bigload plan llama-70b --tp 4 --pp 2 --fits --json",
    "parallel-explain": "bigload plan llama-70b --tp 8 --pp 2 -m 80GiB --explain layers.3 --json",
}
RUNS = [
    "bigload run tiny-llama --random-tokens 2 -n 2 --repeat 2 --from-disk --resident-bytes 0 --json",
    "bigload run tiny-llama --random-tokens 2 -n 1 --plan in-ram.json --json",
]


def schema(name: str) -> dict:
    return json.loads((SCHEMAS / f"{name}-{VERSIONS.get(name, '1.0')}.json").read_text(encoding="utf-8"))


def parsed(text: str) -> dict:
    def refuse(constant: str):
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def properties(node: dict) -> Iterator[tuple[str, dict]]:
    """Yield every property that a schema names, at any depth."""
    for key, value in node.items():
        if key == "properties":
            yield from value.items()
        if isinstance(value, dict):
            yield from properties(value)


def types(node: dict) -> set[str]:
    found = node.get("type", [])
    return {found} if isinstance(found, str) else set(found)


def strict(node: dict) -> dict:
    """Return a schema that knows no other keys than those it names."""
    copied = {key: strict(value) if isinstance(value, dict) else value for key, value in node.items()}
    return {**copied, "additionalProperties": False} if "properties" in node and "type" in node else copied


def test_there_is_a_schema_for_every_verb_and_no_other():
    assert {path.name for path in SCHEMAS.glob("*.json")} == {
        f"{name}-{VERSIONS.get(name, '1.0')}.json" for name in NAMES
    } | {"ranks-2.0.json"}, "which folders of one stage do not need"


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_is_valid_itself(name):
    Draft202012Validator.check_schema(schema(name))
    assert schema(name)["$schema"] == "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_lets_readers_ignore_keys_that_it_does_not_know(name):
    text = json.dumps(schema(name))
    assert '"additionalProperties": false' not in text
    assert '"unevaluatedProperties"' not in text


@pytest.mark.parametrize("name", NAMES)
def test_every_property_is_described_with_its_unit(name):
    for key, node in properties(schema(name)):
        assert node.get("description", "").endswith("."), key
        if key.endswith("_bytes") or key == "bytes":
            assert "bytes" in node["description"].lower(), key
        if key.endswith("_seconds"):
            assert "seconds" in node["description"].lower(), key


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_integers_and_seconds_are_numbers(name):
    for key, node in properties(schema(name)):
        if key in ("dtype_bytes", "token_bytes"):  # by dtype, by device
            assert types(node["additionalProperties"]) == {"integer"}
        elif key.endswith("_bytes") or key == "bytes":
            assert types(node) - {"null"} == {"integer"}, key
        elif key.endswith("_seconds"):
            assert types(node.get("items", node)) - {"null"} == {"number"}, key


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_printed_is_what_its_schema_describes(run, here, command):
    write_shard(here / "empty.safetensors", {})
    torch.save({"a": torch.ones(2, 3), "view": torch.ones(2, 3).t()}, here / "torch.bin")
    for name, make_folder in (("split", make_split), ("pipeline", make_pipeline)):
        if name in command:
            make_folder(here / name)
    if "tiny.json" in command:
        assert run(PLAN).code == 0
    done = run(command)
    assert done.code == 0
    document = parsed(done.stdout)
    family, _, version = document["schema"].partition("/")
    asked = [word.removeprefix("--") for word in command.split() if word.removeprefix("--") in QUESTIONS]
    verb = "plan" if "tiny.json --json" in command else (asked or command.split()[1:])[0]
    verb = {"manifest": "manifest-made"}.get(verb, verb)
    assert (family, version) == (f"bigload.{verb}", VERSIONS.get(verb, "1.0"))
    described = schema(verb)
    Draft202012Validator(described).validate(document)
    Draft202012Validator(strict(described)).validate(document)


@pytest.mark.parametrize("second", ["first", "renamed", "narrow", "bytes"])
def test_what_is_printed_of_a_comparison_is_what_its_schema_describes(run, here, second):
    made = {
        "first": {"a": torch.ones(2, 3), "b": torch.full((4,), float("nan")), "c": torch.zeros(5)},
        "renamed": {"a": torch.ones(2, 3), "z": torch.ones(1), "c": torch.ones(4)},
        "narrow": {"a": torch.rand(2, 3).half(), "b": torch.zeros(4), "c": torch.zeros(5)},
        "bytes": {name: torch.zeros(3, dtype=torch.uint8) for name in "abc"},
    }
    for name in {"first", second}:
        save_file(made[name], here / f"{name}.safetensors")
        assert run(f"bigload reshard {name}.safetensors {name} --layout shards -q").code == 0  # with manifests
    done = run(f"bigload diff first {second} --json")
    assert done.code == (0 if second == "first" else 1), done.stderr
    document = parsed(done.stdout)
    assert document["equal"] is (second == "first")
    Draft202012Validator(strict(schema("diff"))).validate(document)


@pytest.mark.parametrize("name", PARALLEL)
def test_what_is_printed_about_ranks_is_what_its_schema_describes(run, name):
    done = run(PARALLEL[name])
    assert done.code == 0, done.stderr
    document = parsed(done.stdout)
    assert document["schema"] == f"bigload.{name}/1.0"
    Draft202012Validator(strict(schema(name))).validate(document)


def test_recorded_experts_are_what_their_schema_describes():
    document = parsed(ExpertStats(uses={"layers.0.experts": (3, 0)}).to_json())
    Draft202012Validator(strict(schema("expert-stats"))).validate(document)


def test_a_profile_of_a_machine_is_what_its_schema_describes():
    rates = {"weight_rate": {"BF16": 1}, "narrow_weight_rate": {"BF16": 1}}
    device = DeviceProfile(device="cuda:0", name="a GPU", **rates, launch_seconds=1e-5, link_in=1)
    known = {
        "disk_rate": 1,
        "mapped_rate": None,
        "load_rate": 1,
        "ram_bytes": None,
        "cold_load_rate": 1,
        "single_read_rate": 1,
    }
    profile = MachineProfile(name="box", source="measured", devices=(device,), **known)
    Draft202012Validator(strict(schema("profile"))).validate(parsed(profile.to_json()))


@pytest.mark.peers
@pytest.mark.parametrize("command", RUNS)
def test_what_is_printed_of_a_run_is_what_its_schema_describes(run, command):
    pytest.importorskip("transformers")
    assert run("bigload plan tiny-llama -m cpu=1GiB --no-disk -o in-ram.json").code == 0
    done = run(command)
    assert done.code == 0, done.stderr
    document = parsed(done.stdout)
    verb = command.split()[1]
    assert document["schema"] == f"bigload.{verb}/1.0"
    Draft202012Validator(strict(schema(verb))).validate(document)


FAILURES = {
    "inspect nowhere": (2, "checkpoint-not-found"),
    "inspect broken": (1, "invalid-checkpoint"),
    "inspect tiny-llama --depth 0": (2, "usage"),
    "inspect newer.json": (4, "invalid-plan"),
    "plan": (2, "usage"),
    "plan tiny-llama": (2, "option"),
    "plan tiny-llama -m cpu=22Gb": (2, "option"),
    "plan tiny-llama -m cpu=1KiB --no-disk": (3, "does-not-fit"),
    "plan llama-70b -m cuda:0=1GiB": (3, "does-not-fit"),
    "plan tiny-llama --overhead 0 -m cpu=8MiB --fail-if disk": (3, "answer-is-no"),
    "plan tiny-llama --gpus 1KiB": (3, "answer-is-no"),
    "plan tiny-llama -m cpu=1GiB --html - ": (2, "option"),
    "reshard stale.json out": (4, "stale-plan"),
    "reshard gone.json out": (4, "stale-plan"),
    "reshard nowhere.json out": (2, "plan-not-found"),
    "reshard tiny-llama out --dtype int9": (2, "option"),
    "reshard tiny-llama tiny-llama": (2, None),
    "verify nowhere": (2, "manifest-not-found"),
    "bench-load tiny-llama --threads many": (2, "usage"),
    "bench-load nowhere": (2, "checkpoint-not-found"),
    "run-stats tiny-llama": (2, "usage"),
    "run nowhere -p hello": (2, "checkpoint-not-found"),
    "run tiny-llama -p hello --plan stale.json": (4, "stale-plan"),
    "isnpect tiny-llama": (2, "usage"),
}


@pytest.fixture
def spoiled(run, here):
    """Return the current folder, with plans that do not hold and a checkpoint that is none."""
    for name in ("stale", "gone"):
        make_checkpoint(here / name)
        assert run(f"bigload plan {name} -m cpu=1GiB -o {name}.json").code == 0
    make_checkpoint(here / "stale", hidden=16)
    for file in ("stale/model-00002-of-00002.safetensors", "gone/model-00001-of-00002.safetensors"):
        (here / file).unlink()
    make_checkpoint(here / "broken")
    (here / "broken" / "model-00002-of-00002.safetensors").write_bytes(b"short")
    (here / "newer.json").write_text('{"schema": "bigload.plan/2.0"}')
    return here


@pytest.mark.parametrize("command", FAILURES)
@pytest.mark.usefixtures("spoiled")
def test_with_json_a_failure_is_one_document_that_its_schema_describes(run, command):
    exit_code, code = FAILURES[command]
    plain, done = run(f"bigload {command}"), run(f"bigload {command} --json")
    document = parsed(done.stdout)
    Draft202012Validator(strict(schema("error"))).validate(document)
    assert done.code == document["exit_code"] == exit_code
    assert code in (None, document["code"])
    if "--html" not in command:  # without --json, that one is no failure
        assert (plain.code, plain.stdout, plain.stderr) == (done.code, "", done.stderr)
    assert f"error: {document['message']}" in done.stderr
    assert run(f"bigload {command} -j") == run(f"bigload {command} -qj") == done


def test_the_document_of_a_failure_has_its_facts(run, spoiled):
    short = parsed(run("bigload plan llama-70b -m cuda:0=20GiB --no-disk --json").stdout)
    assert short["needed_bytes"] > short["usable_bytes"]
    assert sum(shortfall["lacking_bytes"] for shortfall in short["shortfalls"]) > 0
    assert (short["problems"], short["changes"]) == (None, None)
    broken = parsed(run("bigload inspect broken --json").stdout)
    assert [problem["file"] for problem in broken["problems"]] == ["model-00002-of-00002.safetensors"]
    assert parsed(run("bigload reshard gone.json out --json").stdout)["changes"]


def test_an_interrupted_command_says_so_in_json(run, monkeypatch):
    def interrupt(*_arguments: object, **_options: object):
        raise KeyboardInterrupt

    monkeypatch.setattr("bigload.checkpoint.source.open_checkpoint", interrupt)
    done = run("bigload inspect tiny-llama --json")
    document = parsed(done.stdout)
    Draft202012Validator(strict(schema("error"))).validate(document)
    assert (done.code, document["code"]) == (130, "interrupted")


@pytest.mark.parametrize(("rank", "num_documents"), [("0", 1), ("1", 0)])
def test_of_several_processes_the_first_alone_prints_the_document(run, rank, num_documents):
    done = run("bigload reshard tiny-llama out --json --tp 0", env={"WORLD_SIZE": "2", "RANK": rank})
    assert done.code == 2
    assert done.stdout.count("\n") == num_documents


def test_what_is_no_option_asks_for_no_json(run):
    done = run("bigload inspect -- --json")
    assert (done.code, done.stdout) == (2, "")


def test_a_plan_file_is_what_its_schema_describes(run, here):
    assert run(PLAN).code == 0
    Draft202012Validator(strict(schema("plan"))).validate(parsed((here / "tiny.json").read_text(encoding="utf-8")))


def test_what_is_printed_of_a_damaged_folder_is_what_its_schema_describes(run, here):
    folder = make_split(here / "split")
    (folder / "cpu" / "model.safetensors").unlink()
    with (folder / "cuda-0" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    write_shard(folder / "more.safetensors", {})
    done = run("bigload verify split --json")
    assert done.code == 1
    document = parsed(done.stdout)
    Draft202012Validator(strict(schema("verify"))).validate(document)
    found = [(problem["code"], problem["file"], problem["tensor"]) for problem in document["problems"]]
    assert found == [("missing", "cpu/model.safetensors", None), ("tensor", "cuda-0/model.safetensors", "embed.weight")]
    assert [warning["file"] for warning in document["warnings"]] == ["more.safetensors"]
    assert not document["ok"]


def test_a_manifest_is_what_its_schema_describes(here):
    by_hand = parsed((make_split(here / "split") / "bigload-manifest.json").read_text(encoding="utf-8"))
    shard = ShardFingerprint(file="model.safetensors", num_bytes=9, header_sha256="0" * 64)
    made = Manifest(
        layout="devices",
        files={"a": record_of(b""), "b": FileRecord(num_bytes=9, digest=None, tensors={"w": None, "v": "0" * 32})},
        aliases={"head": "w"},
        source=ManifestSource(path="model", total_bytes=9, shards=(shard,)),
        version="0.1.0",
        options={"dtype": "BF16"},
    )
    for document in (by_hand, parsed("".join(manifest_lines(made)))):
        Draft202012Validator(strict(schema("manifest"))).validate(document)


def test_every_key_is_there_also_when_it_has_nothing_to_say(run):
    document = parsed(run("bigload inspect tiny-llama/model-00002-of-00004.safetensors --json").stdout)
    assert (document["index_file"], document["shards"], document["tensors"]) == (None, None, None)
    assert run(PLAN).code == 0
    document = parsed(run("bigload reshard tiny.json out --dry-run --json").stdout)
    assert {key for key, value in document.items() if value is None} == {
        *("kept_files", "kept_bytes", "written_bytes", "run_seconds", "verify", "verified", "overflows")
    }


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("plan", lambda document: document["devices"][0].update(weights_bytes=1.5)),
        ("plan", lambda document: document["device_map"].update(lm_head="gpu")),
        ("plan", lambda document: document.update(schema="bigload.plan/2.0")),
        ("plan", lambda document: document.pop("device_map")),
        ("plan", lambda document: document["checkpoint"]["shards"][0].update(header_sha256="3fa1")),
    ],
)
def test_a_schema_refuses_what_the_program_never_prints(run, name, spoil):
    document = parsed(run(f"{PLAN} --json").stdout)
    validator = Draft202012Validator(schema(name))
    assert validator.is_valid(document)
    spoil(document)
    assert not validator.is_valid(document)


def test_a_schema_takes_a_newer_minor_version_with_more_keys(run):
    document = parsed(run(f"{PLAN} --json").stdout)
    document.update(schema="bigload.plan/1.7", surprise={"a": 1})
    assert Draft202012Validator(schema("plan")).is_valid(document)
