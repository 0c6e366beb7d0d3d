"""Growth exponents, taken between points above the floor of CPU time and memory."""

import json

import bench_scale
import pytest
from bench_scale import SERIES, Point, Row, merged, read_rows, write_document

from bigload.units import MIB


def row(*points, axis="shards", work="plan"):
    made = (Point(x=x, cpu=cpu, wall=cpu, memory=int(mib * MIB), descriptors=4) for x, cpu, mib in points)
    return Row(axis=axis, work=work, points=tuple(made))


def test_the_exponent_is_the_slope_between_successive_points():
    grown = row((1, 0.2, 10), (10, 2.0, 10), (100, 200.0, 10))
    assert grown.slopes("cpu") == pytest.approx([1, 2])
    assert grown.slopes("memory") == pytest.approx([0, 0])
    assert not grown.is_straight


def test_what_is_below_the_floor_is_fixed_cost_and_judges_nothing():
    assert row((1, 0.001, 0.1), (2, 0.09, 7), (4, 0.18, 14)).is_straight
    assert not row((1, 0.2, 16), (2, 0.2, 64)).is_straight


def test_a_new_row_replaces_its_older_self_in_the_order_of_the_series():
    old = row((1, 1, 1), axis="tensors"), row((1, 1, 1))
    (new,) = merged(
        old,
        [
            row((1, 2, 2)),
        ],
    )[:1]
    assert new.points[0].cpu == 2
    assert [each.axis for each in merged(old, ())] == ["shards", "tensors"]


def test_table_and_pictures_replace_what_is_between_the_marks(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_scale, "picture", lambda rows, path: path.write_text(rows[0].axis))
    document = tmp_path / "scale.md"
    document.write_text("before\n<!-- measured -->\nold\n<!-- end of measured -->\nafter\n")
    write_document(document, [row((1, 1, 1), (10, 10, 1))])
    text = document.read_text()
    assert text.startswith("before\n<!-- measured -->")
    assert text.endswith("<!-- end of measured -->\nafter\n")
    assert "| shards | plan | 1 … 10 | 1.00 10.00 | 1.00 |" in text
    assert "old" not in text
    assert (tmp_path / "scale-shards.svg").read_text() == "shards"


def test_a_work_is_measured_in_a_process_with_few_descriptors(tmp_path):
    series = next(each for each in SERIES if (each.axis, each.work) == ("blocks", "inspect"))
    point = bench_scale.median_point(series, tmp_path, 2, rounds=1)
    assert point.x == 2
    assert point.cpu > 0
    assert point.memory > 0
    assert point.descriptors <= 256


def test_rows_are_read_back(tmp_path):
    assert read_rows(tmp_path / "none.json") == []
    (tmp_path / "rows.json").write_text(json.dumps({"rows": [bench_scale.asdict(row((1, 1, 1)))]}))
    assert read_rows(tmp_path / "rows.json") == [row((1, 1, 1))]
