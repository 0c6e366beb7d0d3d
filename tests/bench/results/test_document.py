import json

import pytest

from bench_reports import full_report, report_of, strategy
from bigload.bench.results.document import bench_document
from bigload.loading.settings import Method


def test_the_document_is_plain_json():
    document = bench_document(full_report())
    assert json.loads(json.dumps(document)) == document
    assert document["schema"] == "bigload.bench-load/1.1"


def test_figures_of_a_strategy_follow_from_its_runs():
    serial = bench_document(full_report())["strategies"][0]
    assert serial["mean_seconds"] == pytest.approx(1.97)
    assert serial["bytes_per_second"] == pytest.approx(4 * 2**30 / 1.97)
    assert serial["times_fastest"] == pytest.approx(1.97 / 1.07)
    assert serial["part_of_raw_read"] == pytest.approx(0.99 / 1.98)  # the medians
    assert (serial["method"], serial["used_method"]) == ("auto", "read")


def test_every_peer_is_there_measured_or_not():
    measured, failed, missing = bench_document(full_report())["peers"]
    assert measured["measured"]["peak_file_bytes"] == 600 << 20
    assert (failed["measured"], failed["version"]) == (None, "1.15.0")
    assert "Errno 5" in failed["problem"]
    assert (missing["version"], missing["package"]) == (None, "tensorizer")


def test_the_size_from_which_threads_pay_is_there():
    assert bench_document(full_report())["recommendation"]["parallel_pays_from_bytes"] == 300 << 20


def test_a_clock_that_stands_still_gives_a_document_all_the_same():
    document = bench_document(report_of(strategy(1, Method.READ, 0.0)))
    assert document["strategies"][0]["bytes_per_second"] is None
    assert document["recommendation"] is None
