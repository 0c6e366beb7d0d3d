"""`bigload run`: what people see, what scripts get, what is refused.

Tables come from figures chosen by hand; the expected text lies in `golden/`, and `BIGLOAD_UPDATE_GOLDEN=1` writes it
anew.
"""

import fcntl
import json
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from text_models import save_model, save_tokenizer

from bigload.devices import Device
from bigload.machine.memory.detected import DetectedMemory
from bigload.machine.profiles.known_machines import known_machine
from bigload.machine.profiles.profile_cache import keep_profile
from bigload.units import MIB
from bigload_cli.views import run as view
from run_reports import GIB, answer, forward, prediction, run_report

GOLDEN = Path(__file__).parent / "golden"
SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "run-1.0.json"
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")


def stats_text(report):
    pieces = view.shown(report, name="llama-8b")
    return "".join(f"{piece}\n" if isinstance(piece, str) else piece.as_text() for piece in pieces)


ONE = run_report(answer(forward(0.25, disk=GIB, ram=2 * GIB), forward(), forward()))
PREDICTED = ONE._replace(prediction=prediction(), cached_fraction=0.25)
MANY = run_report(*(answer(forward(), forward(), seconds=0.5 * number, num_tokens=2) for number in (1, 2, 3)))


@pytest.mark.parametrize(
    ("name", "report"), [("run-stats", ONE), ("run-stats-of-many", MANY), ("run-stats-predicted", PREDICTED)]
)
def test_stats_in_a_pipe(name, report):
    text = stats_text(report)
    path = GOLDEN / f"{name}.pipe.txt"
    if os.environ.get("BIGLOAD_UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 80


def test_a_run_with_nothing_to_bring_in_says_so():
    assert "No weights were streamed" in stats_text(run_report(answer()))
    resident = forward(disk=0, ram=0, fetch=0.0, wait=0.0)
    assert "No weights were streamed: all were there before." in stats_text(run_report(answer(resident, resident)))


def test_the_first_token_of_an_answer_with_more_forwards_than_are_kept_is_not_that_of_another():
    (row,) = [line for line in stats_text(run_report(answer(forward()))).splitlines() if "first token" in line]
    assert row.split()[-5:] == ["-"] * 5


def test_experts_that_cannot_be_loaded_one_by_one_are_named():
    names = tuple(f"model.layers.{number}.feed_forward.experts" for number in range(4))
    told = run_report(answer(forward()), whole_experts=names)
    assert "note: all experts of layers 0-3 feed_forward.experts are loaded together." in stats_text(told)


def test_what_the_system_does_not_count_is_no_zero():
    assert " - " in view.steps([answer(forward(disk=None), num_tokens=1)]).as_text()


# What is refused before transformers is asked for


def test_without_transformers_the_exit_code_is_that_of_bad_usage(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = run("bigload run tiny-llama -p hello")
    assert (done.code, done.stdout) == (2, "")
    assert "error: run needs transformers, which is not installed" in done.stderr
    assert "hint: pip install 'bigload[run]'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("-p hello --prefetch-bytes 2Gb", 2, '"Gb" means gigabits'),
        ("-p hello --resident-bytes -1", 2, "-1"),
        ("--random-tokens 0", 2, "--random-tokens"),
        ("--random-tokens 2 -n 0", 2, "--max-new-tokens"),
        ("-p hello --top-p 2", 2, "--top-p"),
        ("-p hello --temperature -1", 2, "--temperature"),
        ("-p hello --trace nowhere/t.json", 1, "there is no folder nowhere"),
        ("-p hello --trace tiny-llama/config.json", 2, "will not write to tiny-llama/config.json"),
        ("-p hello --plan gone.json", 2, "gone.json"),
        ("-p hello --plan gone.json -m cpu=1GiB", 2, "the plan has limits of its own"),
        ("-p hello --plan gone.json --from-disk", 2, "a plan says what is on disk"),
        ("-p hello --chat", 2, "-p and --chat contradict"),
        ("--chat --json", 2, "a conversation is no document"),
        ("-p hello --repeat 2", 2, "--repeat is for --random-tokens"),
        ("-p ''", 2, "the prompt is empty"),
        ("--file gone.jsonl", 2, "cannot read gone.jsonl: No such file or directory"),
        ("--file tiny-llama/model-00001-of-00004.safetensors", 2, "it is no text in UTF-8"),
        ("--file prompts.jsonl", 2, "line 3 of prompts.jsonl is no prompt"),
    ],
)
def test_what_cannot_be_done_is_told_and_nothing_is_written(run, here, arguments, code, words):
    (here / "prompts.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": 7}\n')
    before = sorted(here.rglob("*"))
    done = run(f"bigload run tiny-llama {arguments}")
    assert (done.code, bool(done.stdout)) == (code, "--json" in arguments)
    assert words in done.stderr
    assert sorted(here.rglob("*")) == before


# Models that run


@pytest.fixture(scope="session")
def talkers(tmp_path_factory):
    """Return a folder with models that have a tokenizer, with a chat template and without, and one that never ends."""
    endless = {"eos_token_id": None, "max_position_embeddings": 10**6}
    folder = tmp_path_factory.mktemp("talkers")
    if find_spec("transformers") is not None:
        for name, template, changes in (
            ("instruct", {}, {}),
            ("base", {"template": None}, {}),
            ("endless", {}, endless),
        ):
            save_model(folder / name, **changes)
            save_tokenizer(folder / name, **template)
    return folder


@pytest.fixture
def talk(talkers, here):
    """Return the current folder, with links to the models that have text."""
    for model in talkers.iterdir():
        (here / model.name).symlink_to(model)
    return here


@pytest.mark.peers
@needs_transformers
@pytest.mark.usefixtures("talk")
class TestText:
    def test_only_the_answer_is_on_stdout(self, run):
        done, quiet = run("bigload run base -p hello -n 8"), run("bigload run base -p hello -n 8 -q")
        assert done.code == quiet.code == 0
        assert done.stdout == quiet.stdout
        assert len(done.stdout) > 1
        assert done.stdout.endswith("\n")
        assert quiet.stderr == ""
        assert done.stderr.startswith("base fits: 100% in RAM\n")

    def test_a_prompt_comes_from_stdin(self, run, monkeypatch):
        expected = run("bigload run base -p hello -n 8").stdout
        for option in ("", "-p -"):
            monkeypatch.setattr(sys, "stdin", open_text("hello\n"))
            assert run(f"bigload run base {option} -n 8").stdout == expected

    def test_the_chat_template_is_used_unless_the_text_is_raw(self, run):
        documents = [
            json.loads(run(f"bigload run {words} -p hello -n 2 --json").stdout)
            for words in ("base", "instruct --raw", "instruct", "instruct --system x")
        ]
        base, raw, chat, system = (document["answers"][0]["prompt_tokens"] for document in documents)
        assert base == raw
        assert (chat, system) == (raw + 3, raw + 6)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ("base --chat", "a conversation needs a chat template; base has none"),
            ("base -p hello --system x", "a system message needs a chat template; base has none"),
            ("instruct -p hello --raw --system x", "a system message needs a chat template; --raw leaves it out"),
            ("tiny-llama -p hello", "tiny-llama has no tokenizer"),
            ("base -p hello --context 400", "the model was made for 256 tokens"),
            ("base -p hello -n 300", "and its answer 300; the context is 256"),
            ("base -p hello --context 4", "the prompt has"),
            ("base --plan small.json -p hello --context 200", "the plan leaves room for 100 tokens"),
            ("base --file long.jsonl", "the prompt in line 2 has"),
            ("base --file messages.jsonl", "the prompt in line 1 needs a chat template"),
        ],
    )
    def test_what_cannot_be_answered_is_told_before_anything_is_loaded(self, run, here, arguments, words, monkeypatch):
        assert run("bigload plan base -m cpu=1GiB --context 100 -o small.json").code == 0
        (here / "long.jsonl").write_text('{"prompt": "a"}\n' + json.dumps({"prompt": "xyz" * 200}) + "\n")
        (here / "messages.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
        monkeypatch.setattr("bigload.generation.planned_model.PlannedModel.dispatched", None)
        done = run(f"bigload run {arguments}")
        assert (done.code, done.stdout) == (2, "")
        assert words in done.stderr
        assert "hint: " in done.stderr

    def test_each_line_of_a_file_is_answered_by_a_line(self, run, here):
        lines = [{"prompt": "hello", "id": "é"}, {"messages": [{"role": "user", "content": "hello"}], "id": [2]}]
        (here / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
        done = run("bigload run instruct --file prompts.jsonl -n 5")
        first, second = map(json.loads, done.stdout.splitlines())
        assert (done.code, first["id"], second["id"]) == (0, "é", [2])
        assert first["text"] == second["text"] == run("bigload run instruct -p hello -n 5").stdout.removesuffix("\n")
        assert first["finish"] == "length"

    def test_a_temperature_makes_answers_random_and_a_seed_makes_them_the_same(self, run):
        def text(options):
            return run(f"bigload run base -p hello -n 30 -q {options}").stdout

        assert text("--temperature 5 --seed 1") == text("--temperature 5 --seed 1") != text("--temperature 5 --seed 2")
        assert text("--temperature 0") == text("") != text("--temperature 5 --seed 1")

    def test_stats_stand_beside_the_answer(self, run):
        done = run("bigload run base --from-disk --resident-bytes 0 -p hello -n 3 --stats --trace t.json")
        assert done.stdout == run("bigload run base -p hello -n 3").stdout
        assert "\nbase -> cpu   LlamaForCausalLM, 273.1 KiB, 273.1 KiB on disk\n" in done.stderr
        assert "\nfirst token       1 " in done.stderr
        assert "\nFirst token after " in done.stderr
        assert done.stderr.endswith("Wrote t.json.\n")
        assert {e.get("cat") for e in json.loads(Path("t.json").read_text())["traceEvents"]} >= {"fetch", "compute"}
        assert run("bigload run base -p hello -n 1 --trace t.json -q").code == 0  # its own file is replaced

    def test_what_was_predicted_on_a_measured_machine_stands_beside_what_was_seen(self, run, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        assert "PREDICTED" not in run("bigload run base -p hello -n 3 --stats").stderr
        measured = replace(known_machine("h100"), name="this machine", source="measured")
        measured = replace(measured, devices=measured.devices[:1])  # the CPU
        assert keep_profile(Path("base").resolve(), measured) is not None
        done = run("bigload run base -p hello -n 3 --stats")
        assert re.search(r"\n +PREDICTED +SEEN\nload .*\nfirst token .*\nnext token ", done.stderr)
        assert re.search(r"-bound\) is for uncached files; \d+% of them were cached\.", done.stderr)
        run("bigload plan base -m cpu=1GiB -o plan.json")
        document = json.loads(run("bigload run base -p hello -n 3 --plan plan.json --json").stdout)
        Draft202012Validator(json.loads(SCHEMA.read_text())).validate(document)
        assert document["prediction"]["prompt_tokens"] == document["answers"][0]["prompt_tokens"]
        assert 0 <= document["cached_fraction"] <= 1
        without = json.loads(run("bigload run base -p hello -n 3 --from-disk --json").stdout)
        assert without["prediction"] is None

    def test_an_interrupted_answer_is_said_to_be_incomplete(self, environment):
        words = [sys.executable, "-m", "bigload_cli", "run", "endless", "-p", "hello", "--context", "1000000"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
            first = process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            text, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        assert (first + text).endswith(b"\n")
        assert errors == b"endless fits: 100% in RAM\ninterrupted: the answer is not complete\n"

    def test_a_lack_of_memory_in_the_middle_of_an_answer_is_told(self, run, monkeypatch):
        import torch
        import transformers

        class Refusing(transformers.LlamaForCausalLM):
            count = 0

            def forward(self, *arguments, **keywords):
                Refusing.count += 1
                if Refusing.count == 3:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
                return super().forward(*arguments, **keywords)

        monkeypatch.setattr(transformers, "LlamaForCausalLM", Refusing)
        done = run("bigload run base -p hello -n 20")
        assert done.code == 1
        assert done.stdout.endswith("\n")
        assert "error: the answer, after a prompt of" in done.stderr
        assert "and 2 tokens, does not fit into memory" in done.stderr
        assert "--context" in done.stderr

    def test_a_reader_that_goes_away_ends_the_answer(self, environment):
        words = [sys.executable, "-m", "bigload_cli", "run", "endless", "-p", "hello", "--context", "1000000"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
            process.stdout.read(1)
            process.stdout.close()
            assert process.stderr.read() == b"endless fits: 100% in RAM\n"
        assert process.returncode == 0

    def test_a_model_of_images_answers_text_and_refuses_the_token_of_an_image(self, run, here):
        from transformers import CLIPVisionConfig, LlamaConfig

        vision = CLIPVisionConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            image_size=28,
            patch_size=14,
        )
        text = LlamaConfig.from_pretrained("base")
        family = "LlavaForConditionalGeneration"
        image = 509  # <|system|> of the tokenizer
        save_model(here / "llava", family, vision_config=vision, text_config=text, image_token_id=image)
        save_tokenizer(here / "llava", None)
        done = run("bigload run llava -p hello -n 2")
        assert done.code == 0
        assert f"\nnote: {family} takes image input too; this is text alone\n" in done.stderr
        assert run("bigload run llava -p hello -n 2 -q").stderr == ""
        done = run("bigload run llava -p '<|system|> what is this?'")
        assert (done.code, done.stdout) == (2, "")
        assert "the prompt has token 509, '<|system|>', in whose place the model takes image input" in done.stderr

    def test_an_encoder_decoder_answers_without_accelerate_if_its_decoder_has_a_begin(self, here, environment):
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4}
        save_model(here / "t5", "T5ForConditionalGeneration", **sizes, decoder_start_token_id=0)
        save_tokenizer(here / "t5", None)
        words = [sys.executable, "-m", "bigload_cli", "run", "t5", "-p", "hello", "-n", "4", "-q"]
        given = {"capture_output": True, "cwd": here, "env": environment(), "text": True}
        done = subprocess.run(words, check=False, **given)
        assert (done.returncode, done.stderr) == (0, "")
        for file in (here / "t5").glob("*config.json"):
            settings = json.loads(file.read_text())
            file.write_text(json.dumps({**settings, "decoder_start_token_id": None}))
        done = subprocess.run(words, check=False, **given)
        assert (done.returncode, done.stdout) == (2, "")
        assert "does not say what its decoder begins with" in done.stderr

    def test_what_no_answer_needs_is_not_imported_and_comes_back_afterwards(self, environment):
        program = (
            "import sys, bigload_cli.verbs as verbs\n"
            "code = verbs.run()\n"
            "unused = {'torch._dynamo', 'torch.distributed.tensor', 'sympy', 'scipy.optimize', 'accelerate'}\n"
            "assert code == 0 and unused.isdisjoint(sys.modules), unused & set(sys.modules)\n"
            "import torch, transformers.utils\n"
            "assert transformers.utils.is_torch_distributed_available()\n"
            "assert torch.compile(lambda x: x + 1, backend='eager')(torch.ones(())) == 2\n"
        )
        words = [sys.executable, "-c", program, "run", "base", "-p", "hello", "-n", "2", "-q"]
        done = subprocess.run(words, capture_output=True, env=environment(), text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def open_text(text):
    import io

    return io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8")


@pytest.mark.peers
@needs_transformers
def test_random_tokens_need_no_tokenizer_and_their_statistics_are_the_answer(run):
    done = run("bigload run tiny-llama --random-tokens 2 -n 2 --repeat 2 --from-disk --resident-bytes 0")
    assert done.code == 0
    assert done.stdout.startswith("tiny-llama -> cpu   LlamaForCausalLM, 14.57 MiB, 14.57 MiB on disk\n")
    assert "\nanswer 2       2 " in done.stdout
    quiet = run("bigload run tiny-llama --random-tokens 1 -n 1 -q")
    assert float(quiet.stdout) > 0
    assert quiet.stderr == ""


@pytest.mark.peers
@needs_transformers
def test_a_model_that_streams_nothing_has_an_empty_trace(run):
    done = run("bigload run tiny-llama --random-tokens 1 -n 1 --trace -")
    assert json.loads(done.stdout)["traceEvents"] == []


# Conversations


class Conversation:
    """The program on a terminal of its own, whose keyboard we are."""

    def __init__(self, command, environment, terminal):
        open_terminal, self._read = terminal
        self._keyboard, screen = open_terminal(80)
        self.shown = ""
        self._seen = 0
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bigload_cli", *command.split()[1:]],
            stdin=screen,
            stdout=screen,
            stderr=screen,
            env=environment(),
            preexec_fn=take_terminal,  # noqa: PLW1509 - no other thread runs
        )
        os.close(screen)

    def type(self, text):
        os.write(self._keyboard, text.encode())

    def wait_for(self, words):
        """Wait until `words` are shown after what was waited for before; return all between."""
        give_up = time.monotonic() + 60
        while words not in self.shown[self._seen :]:
            assert select.select([self._keyboard], [], [], give_up - time.monotonic())[0], self.shown
            read = self._read(self._keyboard)
            assert read, self.shown
            self.shown += read.decode(errors="replace")
        before = self._seen
        self._seen = self.shown.index(words, self._seen) + len(words)
        return self.shown[before : self._seen]

    def press_until(self, key, words):
        """Press `key` until `words` are shown.

        Python passes a signal over that comes after it has shown the prompt and before it waits for a key.
        """
        give_up = time.monotonic() + 60
        while words not in self.shown[self._seen :]:
            assert time.monotonic() < give_up, self.shown
            self.type(key)
            if select.select([self._keyboard], [], [], 1)[0]:
                self.shown += self._read(self._keyboard).decode(errors="replace")
        self.wait_for(words)

    def end(self):
        """Return the exit code, once all has been shown."""
        while read := self._read(self._keyboard):
            self.shown += read.decode(errors="replace")
        os.close(self._keyboard)
        return self.process.wait(60)


def take_terminal():
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def conversation(talk, environment, terminal):
    started = []

    def start(command):
        started.append(Conversation(command, environment, terminal))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


@pytest.mark.peers
@needs_transformers
def test_a_plan_for_all_that_is_free_leaves_memory_for_the_program(run, monkeypatch):
    free = DetectedMemory(Device("cpu"), total_bytes=30 * MIB, free_bytes=19 * MIB, source="cgroup")
    monkeypatch.setattr("bigload.machine.memory.ram.detect_ram", lambda: free)
    words = "bigload run tiny-llama --random-tokens 1 -n 1"
    assert "100% in RAM" in run(f"{words} -m cpu=19MiB").stderr
    assert "on disk" in run(f"{words} -m cpu=auto").stderr


@pytest.mark.peers
@needs_transformers
def test_ctrl_c_ends_an_answer_and_not_the_conversation(conversation):
    talk = conversation("bigload run endless --context 1000000")
    talk.wait_for(">>> ")
    talk.type("tell me everything\n")
    talk.wait_for("everything\r\n")
    time.sleep(0.05)
    talk.type("\x03")  # the terminal sends SIGINT to all that run in it
    talk.wait_for(">>> ")
    talk.press_until("\x03", "ends the chat")
    talk.wait_for(">>> ")
    talk.type("\x04")
    assert talk.end() == 0
    assert "Traceback" not in talk.shown


@pytest.mark.peers
@needs_transformers
def test_a_conversation_in_a_pipe_keeps_its_history_and_the_cache(talk, environment):
    words = ["run", "instruct", "--chat", "-n", "8", "-q"]
    given = "hello\nhello again\n/clear\nhello\n/exit\nnever\n"
    done = subprocess.run(
        [sys.executable, "-m", "bigload_cli", *words],
        input=given,
        capture_output=True,
        env=environment(),
        text=True,
        check=True,
    )
    assert done.stderr == ""
    first, second, third = done.stdout.splitlines()
    assert first == third != second
