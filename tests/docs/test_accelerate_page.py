"""docs/accelerate.md has every name that moves over from accelerate, and what it says of them can be looked up."""

import re
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import accelerate_suite
import bigload

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "accelerate.md").read_text()
SECTIONS = {
    title.strip("`"): re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    for title, text in re.findall(r"^## (.*)\n((?:(?!## ).*\n?)*)", PAGE, re.MULTILINE)
}
THEIRS = {title: names for title, names in SECTIONS.items() if title.startswith("accelerate.")}
NAMES = [name for names in THEIRS.values() for name in names]
MODULES = ("bigload.runtime.", "bigload.distributed.unwrapping")
STREAMING = {"prefetch", "prefetch_bytes", "resident_bytes", "experts_on_demand"}
DISPATCHING = ("cpu_offload", "disk_offload", "dispatch_model", "load_checkpoint_and_dispatch")
WITH_MORE_ARGUMENTS = {"infer_auto_device_map": {"policy"}, **dict.fromkeys(DISPATCHING, STREAMING)}


def test_the_page_names_all_that_the_runtime_has_and_nothing_else():
    runtime = [name for name, module in bigload._MODULE_OF.items() if module.startswith(MODULES)]
    assert sorted(NAMES + SECTIONS["Only here"]) == sorted(runtime)


def test_the_tests_that_the_page_names_are_there():
    written = {
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    named = re.findall(r"`(test_\w+)`", PAGE)
    assert len(named) > 10
    assert [name for name in named if name not in written] == []


def test_a_folder_of_blocks_is_dispatched_as_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), torch.ones(4)
    save_file(plain.state_dict(), "plain.safetensors")
    bigload.reshard("plain.safetensors", "offload", layout="offload")
    with bigload.init_empty_weights():
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    names = {
        "bigload": bigload,
        "dispatch_model": bigload.dispatch_model,
        "model": model,
        "device_map": {"": "disk"},
    }
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(block, "accelerate.md", "exec"), names)
    assert torch.equal(model(x), plain(x))


@pytest.mark.peers
def test_the_page_names_all_of_accelerates_big_model_modules():
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    assert set(accelerate_suite.big_model_names()) - set(NAMES) == set()


@pytest.mark.peers
def test_names_are_defined_where_the_page_says_and_take_the_same_arguments():
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    for module, names in THEIRS.items():
        for name in names:
            theirs, ours = getattr(import_module(module), name), arguments_of(getattr(bigload, name))
            assert theirs.__module__ == module, name
            more = WITH_MORE_ARGUMENTS.get(name, set())
            assert more <= {each[0] for each in ours}, name
            assert [each for each in ours if each[0] not in more] == arguments_of(theirs), name


def test_the_page_names_all_functions_of_process_control_and_no_others():
    section = PAGE.partition("## `PartialState` and `Accelerator`")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert sorted(named) == sorted(
        name
        for module, names in bigload._MODULES.items()
        if module.startswith("bigload.distributed.process_control.")
        for name in names.split()
    )


def arguments_of(called):
    """Return names, kinds and defaults of the arguments that a caller can name."""
    parameters = signature(called).parameters.values()
    return [(each.name, each.kind, each.default) for each in parameters if each.kind is not Parameter.VAR_KEYWORD]
