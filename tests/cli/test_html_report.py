"""Page of a plan: all of the plan, safe to open, without requests elsewhere, and small."""

import base64
import hashlib
import json
import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from bigload.devices import CPU, Device
from bigload.errors import OutputExistsError, WriteError
from bigload.machine.profiles.profile_cache import profile_named
from bigload.planning.budget.budget import MemoryBudget
from bigload.planning.options import options_of
from bigload.planning.plan import TERMS
from bigload.planning.planner import plan_details
from bigload.planning.timing.predict import predict
from bigload_cli.views.plan_page.html_report import MAX_CELLS, html_report, write_report
from bigload_cli.views.plan_page.html_template import breakable, fill
from bigload_cli.views.plan_page.plan_runs import MAX_RUNS, Kind, UnitPiece, pieces_of, runs_of
from builders import checkpoint_of, llama_tensors

VOID = {"meta", "wbr"}
HOSTILE = '</title></style><script>alert(1)</script><img src=x onerror=alert(2)>" onmouseover="alert(3)\' &lt;\x1b[2J\n'
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 32,
    "torch_dtype": "bfloat16",
}
EXPERTS = {"num_experts_per_tok": 2, "n_routed_experts": 8}


class Page(HTMLParser):
    """A parser that insists on closed tags and keeps what tests ask for."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.texts, self.attributes = [], Counter(), [], []
        self.bars, self.rows, self.code = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    @property
    def words(self):
        return " ".join(self.texts)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        assert len(given) == len(attrs), f"an attribute twice in {attrs}"
        self.tags[tag] += 1
        self.attributes += [(tag, *pair) for pair in attrs]
        if given.get("class") == "bar":
            self.bars.append((given["aria-label"], []))
        if tag == "span" and self.open and self.open[-1] == ("div", "bar"):
            self.bars[-1][1].append((given["class"].split(), float(given["style"][6:-1]), given.get("title", "")))
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append((tag, given.get("class", "")))

    def handle_endtag(self, tag):
        assert self.open[-1][0] == tag, f"</{tag}> closes {self.open[-1]}"
        self.open.pop()

    def handle_data(self, data):
        if not self.open or self.open[-1][0] in ("style", "script"):
            return
        self.texts.append(data)
        if any(tag in ("th", "td") for tag, _ in self.open):
            self.rows[-1][-1] += data
        if self.open[-1][0] == "code":
            self.code.append(data)


def drafted(tensors, *budget, config=None, path="models/tiny", **wishes):
    wishes.setdefault("overhead", 0)
    return plan_details(
        checkpoint_of(tensors, config=config, path=path), MemoryBudget.parse(budget), options_of(**wishes)
    )


def sparse_tensors(blocks=4, experts=8):
    tensors = {"model.embed_tokens.weight": 400}
    for block in range(blocks):
        tensors[f"model.layers.{block}.self_attn.q_proj.weight"] = 100
        tensors[f"model.layers.{block}.mlp.gate.weight"] = 10
        tensors |= {f"model.layers.{block}.mlp.experts.{number}.up.weight": 300 for number in range(experts)}
    return tensors | {"model.norm.weight": 10, "lm_head.weight": 400}


PLANS = {
    "two-gpus-ram-disk": lambda: drafted(
        llama_tensors(8), "0=9KiB,1=6KiB,cpu=2500B", config=LLAMA, context=16, overhead=100
    ),
    "cpu-only": lambda: drafted(llama_tensors(4), "cpu=1MiB", config=LLAMA, context=64),
    "experts-apart": lambda: drafted(sparse_tensors(), "0=4800B,cpu=6000B", config=EXPERTS, experts="split"),
    "alike-gpus": lambda: drafted(llama_tensors(4), "0=4KiB,1=4KiB,2=4KiB"),
}


@pytest.fixture(params=PLANS)
def made(request):
    return PLANS[request.param]()


def test_every_tag_is_closed_and_the_page_says_whose_plan_it_is(made):
    page = Page(html_report(made))
    assert page.tags["html"] == page.tags["body"] == page.tags["main"] == page.tags["h1"] == 1
    assert page.texts[0].strip() in ("", "tiny - bigload plan")
    assert "It fits: " in page.words


def test_the_same_plan_gives_the_same_bytes():
    for make in PLANS.values():
        assert html_report(make()) == html_report(make())


def test_segments_of_a_device_add_up_to_what_it_uses_and_what_is_free(made):
    bars = Page(html_report(made)).bars
    assert len(bars) == len(made.plan.used_devices)
    for use, (label, segments) in zip(made.plan.used_devices, bars, strict=True):
        whole = use.budget_bytes or use.used_bytes
        assert label.startswith(f"{use.device}: ")
        used = sum(width for classes, width, _ in segments if "free" not in classes)
        assert used == pytest.approx(100 * use.used_bytes / whole, abs=0.01)
        free = sum(width for classes, width, _ in segments if "free" in classes)
        assert free == pytest.approx(100 * (use.free_bytes or 0) / whole, abs=0.01)
        for term in ("kv", "logits", "activation", "overhead", "workspace"):
            width = sum(width for classes, width, _ in segments if term in classes)
            assert width == pytest.approx(100 * getattr(use, f"{term}_bytes") / whole, abs=0.01)


def test_every_block_of_a_device_is_a_segment_with_its_name_and_size(made):
    for use, (_, segments) in zip(made.plan.used_devices, Page(html_report(made)).bars, strict=True):
        held = [piece for piece in pieces_of(made) if piece.home == use.device and piece.num_bytes]
        tips = [tip.split("\n") for _, _, tip in segments[: len(held)]]
        assert [name for name, _ in tips] == [piece.name for piece in held]
        assert all(re.fullmatch(rf"[\d.]+ \S+, <?[\d.]+% of {use.device}", size) for _, size in tips)


def test_pieces_hold_all_weights_of_their_devices_in_order_of_execution(made):
    pieces = pieces_of(made)
    assert [piece.step for piece in pieces] == sorted(piece.step for piece in pieces)
    for use in made.plan.devices:
        assert sum(piece.num_bytes for piece in pieces if piece.home == use.device) == use.weights_bytes


def test_the_table_has_every_term_of_the_equation_and_the_exact_bytes():
    made = PLANS["two-gpus-ram-disk"]()
    text = html_report(made)
    page = Page(text)
    heading = next(row for row in page.rows if row[0] == "Device")
    assert heading == ["Device", "Budget =", "Weights +", "KV cache +", "Logits +", "Activations +", "Overhead +",
                       "Workspace +", "Free"]  # fmt: skip
    for use in made.plan.used_devices:
        assert len(next(row for row in page.rows if row[0] == str(use.device))) == len(heading)
        sizes = [use.budget_bytes, use.free_bytes, *(getattr(use, f"{term}_bytes") for term in TERMS)]
        for size in filter(None, sizes):
            assert ("td", "title", f"{size} bytes") in page.attributes


def test_every_run_of_modules_is_a_row_with_its_device_above():
    made = PLANS["experts-apart"]()
    rows = Page(html_report(made)).rows
    start = next(index for index, row in enumerate(rows) if row[0] == "Module")
    device, shown = None, {}
    for row in rows[start + 1 :]:
        if len(row) == 1:
            device = row[0]
        else:
            shown[device, row[0]] = row[1:]
    elsewhere = {"cuda:0": "", "cpu": ", run on cuda:0", "disk": ", run on cuda:0"}
    assert set(shown) == {
        (str(use.device), f"{run.name} {run.kind}{elsewhere[str(use.device)]}")
        for use in made.plan.used_devices
        for run in runs_of(piece for piece in pieces_of(made) if piece.home == use.device)
    }
    assert shown["cuda:0", "model.layers 0 blocks"][0] == "1"
    assert shown["cuda:0", "model.layers 1-3 without routed experts blocks"][:3] == ["3", "110 B", "330 B"]
    assert shown["cpu", "model.layers 1-2 mlp.experts routed experts, run on cuda:0"][:2] == ["2", "2.3 KiB"]


def test_what_a_token_waits_for_is_told_by_source_with_the_seconds():
    made = PLANS["experts-apart"]()
    page = Page(html_report(made))
    row = next(row for row in page.rows if row[0] == "cpu to cuda:0")
    held, needed = made.plan.streamed_bytes[CPU], made.plan.token_bytes[CPU]
    assert 0 < needed < held
    assert row[1:4] == [f"{held / 1024:.1f} KiB", f"{needed / 1024:.1f} KiB", "24.00 GiB/s"]
    assert "Nothing is streamed" in Page(html_report(PLANS["cpu-only"]())).words


def test_times_that_are_predicted_are_told_and_drawn():
    made = PLANS["two-gpus-ram-disk"]()
    prediction = predict(made.plan, made.structure, profile_named("h100"))
    text = html_report(made, prediction=prediction)
    page = Page(text)
    assert str(prediction) in page.words
    assert f"predicted, {prediction.bound_by}-bound" in page.words
    drawn = json.loads(re.search(r'<script type="application/json" id="model">(.*?)</script>', text)[1])["prediction"]
    assert [tuple(step) for step in drawn["steps"]] == [tuple(step) for step in prediction.steps]
    assert drawn["steps"]


def test_certificate_device_changes_and_notes_are_there(made):
    page = Page(html_report(made))
    assert str(made.plan.certificate).removeprefix("optimal: ") in page.words
    assert f"Device changes {made.plan.num_device_changes} per forward pass" in page.words
    for note in made.plan.notes:
        assert note.text in page.words


def test_what_is_left_out_has_a_heading_of_its_own():
    tensors = llama_tensors(4) | {"model.layers.4.eh_proj.weight": 100, "model.layers.4.self_attn.q.weight": 100}
    made = drafted(tensors, "cpu=1MiB", config=LLAMA | {"num_hidden_layers": 4, "num_nextn_predict_layers": 1})
    assert made.plan.left_out == ("model.layers.4",)
    assert re.search(r"Left out [^:]*: model\.layers\.4 \(1 module, 200 B\)", Page(html_report(made)).words)


def test_the_next_command_names_the_plan_file(tmp_path):
    made = PLANS["cpu-only"]()
    assert Page(html_report(made)).code == ["bigload reshard plan.json tiny.split"]
    assert Page(html_report(made, plan_file=tmp_path / "p q.json")).code == [
        f"bigload reshard '{tmp_path}/p q.json' tiny.split"
    ]


def test_labels_of_the_axis_do_not_overlap(made):
    axis = html_report(made).partition('<div class="axis">')[2].partition("<h2>")[0]
    places = [(float(left), float(width)) for left, width in re.findall(r"left:([\d.]+)%;width:([\d.]+)%", axis)]
    assert places
    for (left, width), (following, _) in pairwise(places):
        assert left + width <= following + 0.001


def test_one_scale_is_drawn_where_devices_differ_only():
    assert 'class="scale"' in html_report(PLANS["two-gpus-ram-disk"]())
    assert 'class="scale"' not in html_report(PLANS["alike-gpus"]())


def test_hostile_names_are_text_and_nothing_else():
    blocks = {f"model.layers.{number}.{HOSTILE}.w": 1000 for number in range(4)}
    tensors = blocks | {f"{HOSTILE}.weight": 500, "embed_tokens.weight": 600, f"{'a' * 5000}.weight": 700}
    made = drafted(tensors, "0=5000B,cpu=2500B", path=f"models/{HOSTILE.replace('/', '|')}")
    page, plain = (Page(html_report(each)) for each in (made, PLANS["cpu-only"]()))
    assert page.tags["script"] == plain.tags["script"] == 2
    assert set(page.tags) <= set(plain.tags) | {"tfoot"}
    assert not [name for _, name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    assert any(row[0].startswith("</title></style><script>alert(1)</script>") for row in page.rows)
    assert "\x1b" not in html_report(made)
    assert "a" * 200 not in html_report(made)


@pytest.mark.parametrize("text", ["<", "&", '"', "'", "</script>", "\x00", "\u202e"])
def test_text_and_attributes_are_escaped_where_they_enter(text):
    element = fill("segment", look="s", width="1", name=text, size=text, share=text, device=text)
    element += fill("note", text=text)
    page = Page(element)
    assert page.tags == {"span": 1, "li": 1}
    assert "\x00" not in element
    assert "\u202e" not in element


def test_a_name_folds_after_dots_and_underscores_and_is_escaped_too():
    assert breakable("a.b_c<") == "a.<wbr>b_<wbr>c&lt;"


def test_a_placeholder_without_a_value_is_an_error():
    with pytest.raises(KeyError):
        fill("note")


def test_the_page_asks_for_nothing_and_forbids_what_it_does_not_hold(made):
    text = html_report(made)
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<link|<iframe|<img", text)
    policy = next(value for _, name, value in Page(text).attributes if name == "content")
    assert policy.startswith("default-src 'none'")
    script = re.search(r"<script>(.*)</script>", text, re.DOTALL)[1]
    assert f"script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy


def test_colours_follow_the_reader_and_paper_has_them_too():
    text = html_report(PLANS["cpu-only"]())
    assert "prefers-color-scheme: dark" in text
    assert "print-color-adjust: exact" in text
    assert 'lang="en"' in text
    assert 'name="viewport"' in text


def test_a_model_of_very_many_blocks_and_experts_has_a_small_page():
    blocks = MAX_CELLS + 40
    made = drafted(sparse_tensors(blocks, experts=16), "cpu=4MiB", config=EXPERTS)
    text = html_report(made)
    assert len(text) < 90_000
    (_, segments), *_ = Page(text).bars
    assert [tip.partition("\n")[0] for _, _, tip in segments if "layers" in tip] == [f"model.layers 0-{blocks - 1}"]


def test_very_many_different_modules_are_taken_together_and_none_is_lost():
    pieces = [
        UnitPiece(family=(f"module{number}", ""), number=None, kind=Kind.OTHER, num_bytes=1 + number % 7, home=CPU,
              runs_on=CPU, step=number)
        for number in range(20_000)
    ]  # fmt: skip
    runs = runs_of(pieces)
    assert len(runs) <= MAX_RUNS
    assert [piece for run in runs for piece in run.pieces] == pieces
    assert runs[0].name == "module0 … module166"
    made = drafted({f"module{number}.weight": 1000 + number % 7 for number in range(300)}, "cpu=1MiB")
    assert len(html_report(made)) < 120_000


def test_pieces_know_where_they_run():
    pieces = pieces_of(PLANS["two-gpus-ram-disk"]())
    assert {piece.runs_on for piece in pieces} == {Device("cuda", 0), Device("cuda", 1)}
    assert {str(piece.home) for piece in pieces} == {"cuda:0", "cuda:1", "cpu", "disk"}


def test_a_report_replaces_a_report_and_nothing_else(tmp_path):
    made, target = PLANS["cpu-only"](), tmp_path / "report.html"
    write_report(made, target)
    write_report(made, target)
    assert target.read_text(encoding="utf-8") == html_report(made)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    other = tmp_path / "mine.html"
    other.write_text("<!doctype html>\n<p>mine")
    for taken in (other, tmp_path):
        with pytest.raises(OutputExistsError):
            write_report(made, taken)
    assert other.read_text() == "<!doctype html>\n<p>mine"


def test_a_report_that_cannot_be_written_is_an_error_that_says_so(tmp_path):
    with pytest.raises(WriteError, match=r"cannot write .*report\.html"):
        write_report(PLANS["cpu-only"](), tmp_path / "absent" / "report.html")


def test_the_command_writes_the_page_beside_its_answer(run, here):
    outcome = run("bigload plan tiny-llama -m cuda:0=6MiB,cpu=8MiB --overhead 0 --html report.html")
    assert outcome.code == 0
    assert "It fits: " in Page((here / "report.html").read_text(encoding="utf-8")).words
