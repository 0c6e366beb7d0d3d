"""Load format `bigload` of vLLM, as far as vLLM is not needed; tests/serving has the rest."""

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bigload.errors import StateDictMismatchError
from bigload.parallel.vllm_loader import _check

ROOT = Path(__file__).parents[2]


def test_the_entry_point_names_a_function_without_arguments():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["bigload"].partition(":")
    assert getattr(import_module(module), function).__wrapped__.__code__.co_argcount == 0


def test_the_plugin_imports_neither_vllm_nor_torch():
    """vLLM calls it in all of its processes, whatever format they load."""
    program = "import sys, bigload.parallel.vllm_loader; print({'vllm', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_model_with_other_tensors_than_expected_is_refused():
    state = {name: torch.empty(8, 4, device="meta") for name in ("padded", "whole", "more")}
    made = {name: SimpleNamespace(torch_shape=(6, 4)) for name in ("padded", "whole", "less")}
    with pytest.raises(StateDictMismatchError) as error:
        _check("Model", state, made, padded=["padded"])
    text = str(error.value)
    assert "does not match vLLM's Model: 1 missing, 1 unexpected, 1 of another shape" in text
    assert "whole [6, 4], expected [8, 4]" in text
    assert "leave --load-format out" in text
