"""The page of a plan in a browser: it says nothing on the console, and keys ask it what if."""

import importlib.util
import json

import pytest
from page_browser import browse

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("PyQt6") is None or importlib.util.find_spec("PyQt6.QtWebEngineCore") is None,
    reason="needs a browser: PyQt6-WebEngine, of the extra browser",
)

PLAN = "bigload plan tiny-llama -m cuda:0=6MiB,cpu=8MiB --overhead 0"
TEXTS = """JSON.stringify(["answer", "words", "subject"].map((id) => document.getElementById(id).textContent))"""
FOCUS = "document.activeElement.id || document.activeElement.getAttribute('aria-label')"
WEIGHTS = """JSON.stringify([...document.querySelectorAll("#result tbody tr")].map((row) =>
    [row.cells[0].textContent, row.cells[2].title]))"""
UNNAMED = """[...document.querySelectorAll("input, select, button, [role=img], [role=region]")].filter((element) =>
    !element.getAttribute("aria-label") && !(element.labels || []).length && !element.textContent.trim()).length"""
WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture
def page(run, here):
    assert run(f"{PLAN} --html report.html").code == 0
    return here / "report.html"


def test_keys_reach_every_control_and_a_slider_places_the_model_anew(page, run):
    steps = [{"run": TEXTS}, *[{"key": "Tab"}, {"run": FOCUS}] * 14]
    given, console = browse(page, steps)
    assert console == []
    assert given[2::2] == [
        "c0", "cuda:0", "c1", "cpu", "c2", "context", "c3", "batch", "c4", "c5", "c6", "copy",
        "What fills each device, table", "What a token waits for, table",
    ]  # fmt: skip
    moved = [{"key": "Tab"}, {"key": "Tab"}, *[{"key": "Right"}] * 3, {"run": TEXTS}, {"run": WEIGHTS}]
    moved += [*[{"key": "Left"}] * 3, {"run": TEXTS}]
    again, console = browse(page, moved)
    assert console == []
    planned, asked, back = json.loads(given[0]), json.loads(again[5]), json.loads(again[-1])
    assert back == planned
    assert asked[0] != planned[0]
    weights = dict(json.loads(again[6]))
    outcome = run(f"{asked[1]} -q")
    assert outcome.code == 0
    for word in outcome.stdout.strip().split(","):
        device, _, num_bytes = word.partition("=")
        assert weights[device] == f"{num_bytes} bytes"


def test_predicted_times_follow_the_controls(run, here):
    assert run(f"{PLAN} --profile 4090 --html report.html").code == 0
    rates = "document.getElementById('rates').textContent"
    steps = [{"run": rates}, {"key": "Tab"}, {"key": "Tab"}, *[{"key": "Right"}] * 2, {"run": TEXTS}, {"run": rates}]
    given, console = browse(here / "report.html", steps)
    assert console == []
    asked = run(f"{json.loads(given[-2])[1]} --overhead 0 --profile 4090 --json")
    rate = 1 / json.loads(asked.stdout)["prediction"]["token_seconds"]
    assert given[-1].startswith(f"About {float(f'{rate:.2g}'):g} tokens/s")
    assert given[0] != given[-1]


def test_what_a_field_cannot_read_is_said_beside_it(page):
    typed = "field = document.getElementById('c0'); field.value = '22G'; field.dispatchEvent(new Event('input')); "
    given, console = browse(page, [{"run": f"{typed} field.getAttribute('aria-invalid') + field.parentNode.innerText"}])
    assert given[0].startswith("true")
    assert "A size is such as 22GiB" in given[0]
    assert console == []


@pytest.mark.parametrize("width", [360, 768, 1600])
def test_the_page_fits_its_window_and_names_all_controls(page, width):
    moved = [{"key": "Tab"}, {"key": "Tab"}, {"key": "End"}, {"run": WIDE}, {"run": UNNAMED}]
    given, console = browse(page, [{"run": WIDE}, {"run": UNNAMED}, *moved], width=width, is_dark=width == 768)
    assert (given[0], given[1], given[-2], given[-1], console) == (0, 0, 0, 0, [])


def test_the_page_runs_no_script_but_its_own(page):
    added = (
        "part = document.createElement('script'); part.textContent = 'window.ran = true'; document.body.append(part);"
    )
    given, console = browse(page, [{"run": f"{added} String(window.ran)"}])
    assert given == ["undefined"]
    assert any("Content Security Policy" in line for line in console)
