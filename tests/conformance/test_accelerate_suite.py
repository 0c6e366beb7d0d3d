"""accelerate's own tests of its big-model API, run against bigload's code; see `fixtures/accelerate_suite.py`."""

import pytest

import accelerate_suite

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("parameterized", reason="parameterized is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["of this machine", "simulated"])
def test_what_passes_with_accelerate_passes_with_bigload_and_none_of_accelerates_code(monkeypatch, devices):
    monkeypatch.delenv("BIGLOAD_SIMULATED", raising=False)
    if devices == "simulated":
        monkeypatch.setenv("BIGLOAD_SIMULATED", "1")
    comparison = accelerate_suite.compare()
    assert len(comparison.goal) >= (85 if devices == "simulated" else 59)
    assert sorted(set(comparison.goal) - set(comparison.reached)) == []


def test_every_function_and_class_of_accelerates_big_model_modules_has_its_like():
    assert accelerate_suite.missing_names() == ()


def test_names_of_the_big_model_api_are_redirected_and_no_others():
    source = (
        "from accelerate.hooks import (\n    ModelHook,\n    add_hook_to_module as add,\n)\n"
        "from accelerate.utils import is_xpu_available, offload_weight\n"
        "from torch import nn\n"
    )
    redirected = accelerate_suite.Redirection(source).text
    assert redirected.splitlines() == [
        "from bigload_under_accelerates_names import ModelHook, add_hook_to_module as add",
        "",
        "",
        "",
        "from accelerate.utils import is_xpu_available; from bigload_under_accelerates_names import offload_weight",
        "from torch import nn",
    ]


def test_a_test_that_runs_in_accelerates_code_does_not_count(tmp_path):
    tests = """
import unittest
from accelerate.hooks import ModelHook
from accelerate.utils.modeling import dtype_byte_size
import torch

class Tests(unittest.TestCase):
    def test_in_accelerate(self):
        ModelHook().init_hook(torch.nn.Linear(1, 1))

    def test_elsewhere(self):
        pass

    def test_fails(self):
        assert dtype_byte_size(torch.float32) == 5
"""
    endings = accelerate_suite.run(tmp_path, {"test_some.py": tests}, None, {"test_some.py": {}})
    assert {test.rpartition("::")[2]: ending.verdict for test, ending in endings.items()} == {
        "test_in_accelerate": "in accelerate",
        "test_elsewhere": "passed",
        "test_fails": "failed",
    }
    in_accelerate = endings["test_some.py::Tests::test_in_accelerate"]
    assert in_accelerate.ran_in_accelerate == ("accelerate.hooks.ModelHook.init_hook",)


def test_a_name_that_bigload_lacks_fails_when_it_is_used(tmp_path):
    tests = """
from accelerate.big_modeling import _refuse_recurrent_layers_under_sequence_parallelism as absent
from accelerate.utils import convert_file_size_to_int

class Inherits(absent):
    pass

def test_another():
    assert convert_file_size_to_int("1KB") == 1000

def test_it():
    Inherits()
"""
    files = {"test_some.py": accelerate_suite.Redirection(tests).text, **accelerate_suite.NAMES_FILE}
    endings = accelerate_suite.run(tmp_path, files, None, {"test_some.py": {}})
    assert endings["test_some.py::test_another"].verdict == "passed"
    assert "bigload has no _refuse_recurrent_layers" in endings["test_some.py::test_it"].reason
