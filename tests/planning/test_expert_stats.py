"""Recorded frequencies of experts: written, read back, refused where they are something else or of another model."""

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from bigload.errors import OptionError
from bigload.planning.expert_stats import ExpertStats

STATS = ExpertStats(uses={"layers.0.experts": (3, 0, 5), "layers.1.experts": (1, 1, 1)})
SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schemas/expert-stats-1.0.json").read_text())


def test_what_is_written_is_read_and_as_the_schema_says(tmp_path):
    path = tmp_path / "experts.json"
    path.write_text(STATS.to_json())
    assert ExpertStats.read(path) == STATS
    Draft202012Validator(SCHEMA).validate(json.loads(path.read_text()))
    assert STATS.counts["layers.0.experts.2"] == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ('{"schema": "bigload.plan/1.2"}', "bigload.expert-stats/1.0"),
        ('{"schema": "bigload.expert-stats/2.0", "experts": {}}', "this bigload reads 1.x"),
        ('{"schema": "bigload.expert-stats/1.0"}', '"experts" is no object'),
        ('{"schema": "bigload.expert-stats/1.0", "experts": {"a": [1, -1]}}', "'a' has no list of numbers"),
        ('{"schema": "bigload.expert-stats/1.0", "experts": {"a": [true]}}', "'a' has no list of numbers"),
    ],
)
def test_a_file_of_something_else_is_refused(text, words, tmp_path):
    (tmp_path / "experts.json").write_text(text)
    with pytest.raises(OptionError, match="run --experts") as caught:
        ExpertStats.read(tmp_path / "experts.json")
    assert words in caught.value.message


def test_a_file_that_is_not_there_is_an_error_with_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an error shortens long values
    with pytest.raises(OptionError, match=r"none\.json.*No such file"):
        ExpertStats.read(Path("none.json"))


def test_a_record_of_another_model_is_refused_with_what_differs():
    STATS.check({"layers.0.experts": 3, "layers.1.experts": 3, "layers.2.experts": 3})
    with pytest.raises(OptionError, match="of another model: 2 modules") as caught:
        STATS.check({"layers.0.experts": 4})
    assert caught.value.details == (
        "layers.0.experts has 4 experts, recorded were 3",
        "layers.1.experts has 0 experts, recorded were 3",
    )
