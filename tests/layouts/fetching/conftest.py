"""A model in a repository of the Hub on the loopback."""

import json

import pytest

from builders import make_checkpoint


def make_model(folder, **options):
    """Write a checkpoint of three shards with heads to divide, and files beside it."""
    make_checkpoint(folder, shards=3, hidden=64, vocab=256, **options)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("README.md", "tokenizer.json", "modeling.py", "1_Pooling/config.json", "empty.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("" if name == "empty.txt" else name)
    return folder


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model")


@pytest.fixture
def repository(served, model):
    return served.add("org/tiny", model)
