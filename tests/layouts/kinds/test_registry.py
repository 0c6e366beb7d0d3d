"""Output layouts by name: a layout that is registered from outside is written, verified and resumed like the others."""

import json

import pytest
import torch
from safetensors.torch import load_file

import bigload
from bigload.errors import OptionError
from bigload.layouts.kinds.layout import OutputLayout, aligned
from bigload.layouts.kinds.registry import LAYOUTS, RegisteredLayout
from bigload.layouts.options import ReshardOptions
from bigload.layouts.output import Output, OutputFile, OutputTensor
from bigload.layouts.resharding.preparation import prepare_reshard
from bigload.layouts.resharding.reshard import run_reshard
from bigload_cli.views import reshard as view
from builders import make_checkpoint


def lay_out_by_first_letter(request):
    """Return a folder per first letter of the names of tensors."""
    letters = {}
    for tensor in request.checkpoint.tensors.values():
        written = OutputTensor(source=tensor, dtype=request.options.dtypes(tensor))
        letters.setdefault(tensor.name[0], []).append(written)
    prefix = request.options.value("prefix") or ""
    files = [
        OutputFile(file=f"{prefix}{letter}/model.safetensors", tensors=aligned(group))
        for letter, group in letters.items()
    ]
    documents = {"letters.json": json.dumps(sorted(letters)).encode()}
    return Output(files=tuple(files), documents=documents, notes=(f"{len(letters)} letters",))


@pytest.fixture
def letters(monkeypatch):
    layout = OutputLayout(
        lay_out=lay_out_by_first_letter,
        takes_keep_fp32=False,
        own_options=("tp", "prefix"),
        recorded_options=("tp", "prefix"),
        next_step=lambda out, output, plan: f"read {out}/letters.json",
    )
    monkeypatch.setitem(LAYOUTS, "letters", RegisteredLayout("a folder per letter", layout))
    return layout


def test_a_layout_from_outside_is_written_verified_and_loaded(letters, tmp_path):
    source = make_checkpoint(tmp_path / "source")
    report = bigload.reshard(
        source, tmp_path / "out", layout="letters", dtype="fp16", tp=2, layout_options={"prefix": "by-"}
    )
    assert report.output.layout == "letters"
    expected = {name: tensor.to(torch.float16) for name, tensor in bigload.load(source).items()}
    found = {}
    for file in (tmp_path / "out").glob("by-?/*.safetensors"):
        found |= load_file(file)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    manifest = json.loads((tmp_path / "out" / "bigload-manifest.json").read_text())
    assert manifest["layout"] == "letters"
    assert {**manifest["options"], "tp": 2, "prefix": "by-"} == manifest["options"]
    assert bigload.verify(tmp_path / "out").ok
    file = next((tmp_path / "out").glob("*/*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert [problem.code for problem in bigload.verify(tmp_path / "out").problems] == ["tensor"]


def test_a_layout_from_outside_is_resumed(letters, tmp_path):
    source = make_checkpoint(tmp_path / "source")
    first = bigload.reshard(source, tmp_path / "out", layout="letters")
    again = bigload.reshard(source, tmp_path / "out", layout="letters", resume=True)
    assert (again.kept_files, again.written_bytes) == (len(first.output.files), 0)


def test_what_a_layout_cannot_do_is_refused_by_its_name(letters, tmp_path):
    source = make_checkpoint(tmp_path / "source")
    for options, expected in (
        ({"keep_fp32": ["norm"], "dtype": "fp16"}, "none for the layout letters"),
        ({"offload_format": "dat"}, "it is for the layout offload, not for letters"),
        ({"layout_options": {"suffix": 1}}, "an option that only the layout letters has"),
        ({"layout_options": {"tp": 2}}, "an option that only the layout letters has"),
    ):
        with pytest.raises(OptionError, match=expected):
            bigload.reshard(source, tmp_path / "out", layout="letters", **options)
    with pytest.raises(OptionError, match="it is for the layout ranks and vllm and letters, not for shards"):
        bigload.reshard(source, tmp_path / "out", layout="shards", tp=2)
    with pytest.raises(OptionError, match="one of devices, offload, shards, ranks, gguf, dcp, vllm, letters"):
        bigload.reshard(source, tmp_path / "out", layout="words")
    with pytest.raises(OptionError, match="only SGLang writes it; serve the plain folder"):
        bigload.reshard(source, tmp_path / "out", layout="sglang")


def test_the_command_line_shows_a_layout_from_outside(letters, tmp_path):
    options = ReshardOptions(layout="letters")
    prepared = prepare_reshard(make_checkpoint(tmp_path / "source"), tmp_path / "out", options)
    lines = view.announced(prepared, dry_run=False, num_processes=1)
    assert "letters: a folder per letter" in lines
    assert view.closing(prepared, run_reshard(prepared), peak_bytes=1)[-1] == f"Next: read {tmp_path}/out/letters.json"
