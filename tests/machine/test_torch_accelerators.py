"""Accelerators that this process uses by torch, with a torch that says what one with such a backend would say."""

import os
import sys
from types import SimpleNamespace

import pytest

from bigload.machine.accelerators.gpus import detect_gpus


def torch_with(kind, *answers, is_used=True):
    """Return what `bigload` asks of a torch with devices of `kind`; an answer is (free, total) or an error."""

    def mem_get_info(number):
        if isinstance(answers[number], Exception):
            raise answers[number]
        return answers[number]

    return SimpleNamespace(
        accelerator=SimpleNamespace(
            is_available=lambda: bool(answers),
            current_accelerator=lambda: SimpleNamespace(type=kind),
            device_count=lambda: len(answers),
        ),
        **{kind: SimpleNamespace(is_initialized=lambda: is_used, mem_get_info=mem_get_info)},
    )


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_devices_in_use_are_those_of_torch(monkeypatch, kind):
    broken = RuntimeError("The device does not support it. More words.")
    monkeypatch.setitem(sys.modules, "torch", torch_with(kind, (5, 8), broken))
    found = detect_gpus()
    assert [(str(each.device), each.free_bytes, each.total_bytes, each.source) for each in found.memory] == [
        (f"{kind}:0", 5, 8, "torch")
    ]
    assert [(str(each.device), each.reason) for each in found.unknown] == [
        (f"{kind}:1", "torch says: The device does not support it")
    ]


@pytest.mark.parametrize(
    "torch", [None, torch_with("cuda"), torch_with("cuda", (5, 8), is_used=False), torch_with("mps", (5, 8))]
)
def test_what_torch_does_not_use_is_left_to_the_tools(monkeypatch, tmp_path, torch):
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "are not installed" in detect_gpus().missing


def test_other_variables_than_those_of_this_process_are_not_asked_of_torch(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", torch_with("cuda", (5, 8)))
    assert detect_gpus(environ={**os.environ, "PATH": str(tmp_path)}).memory == ()
