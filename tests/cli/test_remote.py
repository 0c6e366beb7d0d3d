"""Commands on a repository of a loopback Hub."""

import json
import signal
import subprocess
import sys
import threading

import pytest

from bigload_cli import output
from builders import make_checkpoint
from hub_server import served_hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with served_hub(monkeypatch, tmp_path / "cache") as server:
        server.add("org/tiny", make_checkpoint(tmp_path / "source", shards=3))
        yield server


@pytest.fixture
def run_here(hub, run, tmp_path, monkeypatch):
    """Return a function that runs a command in this process, and returns its answer, notes and exit code."""
    monkeypatch.setattr(output, "SHOWN_AFTER_SECONDS", 0)
    monkeypatch.chdir(tmp_path)

    def run_line(line, **variables):
        done = run(f"bigload {line}", env={"XDG_CACHE_HOME": str(tmp_path / "cache"), **variables})
        return done.stdout, done.stderr, done.code

    return run_line


PROGRAM = """
import json, sys
from bigload.checkpoint.sources import ranged_source
from bigload_cli import app, output
output.SHOWN_AFTER_SECONDS = 0
ranged_source._sleep = lambda seconds: None  # between tries
try:
    app.main()
except SystemExit as end:
    heavy = [name for name in ("torch", "numpy", "safetensors") if name in sys.modules]
    print(json.dumps([end.code, heavy]), file=sys.stderr)
"""


def run(hub, tmp_path, *words, **variables):
    """Run a command in a process of its own, which takes `hub` for the Hub; return its answer, notes and end."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **hub.environment(tmp_path / "cache"), **variables}
    command = [sys.executable, "-c", PROGRAM, *words]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    *notes, end = done.stderr.splitlines()
    return done.stdout, "\n".join(notes), json.loads(end)


def test_inspect_and_plan_take_a_repository_without_torch_and_plans_open_by_their_path(hub, tmp_path, run_here):
    commit = hub.repositories["org/tiny"].commit
    answer, _, end = run(hub, tmp_path, "inspect", "org/tiny", "--json", "--shards")
    assert end == [0, []]
    assert json.loads(answer)["path"] == f"hf://org/tiny@{commit}"
    hub.requests.clear()
    _, _, end = run(hub, tmp_path, "plan", "org/tiny", "-m", "cpu=1GiB", "-o", "plan.json")
    assert end == [0, []]
    assert not hub.requests
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["checkpoint"]["path"] == f"hf://org/tiny@{commit}"
    assert all(len(shard["etag"]) == 64 for shard in plan["checkpoint"]["shards"])
    answer, _, code = run_here("plan hf://org/tiny -m cpu=1GiB --explain model.layers.0")
    assert (code, "model.layers.0" in answer) == (0, True)


def test_a_rate_limit_is_a_line_on_stderr(hub, tmp_path):
    hub.fault("resolve", file="config.json", status=429, headers={"Retry-After": "1"})
    _, notes, end = run(hub, tmp_path, "inspect", "org/tiny", "-q")
    assert end == [0, []]
    assert notes.startswith("warning: 127.0.0.1:")
    assert notes.endswith("limits the rate of requests; waiting 1 s as it asks")


def test_a_repository_that_is_not_there_is_bad_usage_and_one_that_is_gated_a_failure(hub, run_here):
    answer, notes, code = run_here("inspect org/tyni")
    assert (answer, code) == ("", 2)
    assert "did you mean org/tiny?" in notes
    hub.repositories["org/tiny"].gated = True
    answer, notes, code = run_here("plan org/tiny -m cpu=1GiB")
    assert (answer, code) == ("", 1)
    assert "hint: ask for access at https://huggingface.co/org/tiny" in notes


@pytest.mark.parametrize("variable", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", None])
def test_tokens_come_from_where_huggingface_hub_has_them_and_go_nowhere_else(hub, tmp_path, run_here, variable):
    hub.repositories["org/tiny"].private = True
    _, notes, code = run_here("inspect org/tiny")
    assert (code, "private" in notes) == (2, True)
    variables = {}
    if variable is None or variable.endswith("PATH"):  # as `hf auth login` leaves it
        file = tmp_path / ("cache/token" if variable is None else "my-token")
        file.parent.mkdir(exist_ok=True)
        file.write_text(hub.token)
        variables = {} if variable is None else {variable: str(file)}
    else:
        variables = {variable: hub.token}
    line = "plan org/tiny -m cpu=1GiB -o plan.json"
    if variable == "HF_TOKEN_PATH":  # read at import
        answer, notes, (code, _) = run(hub, tmp_path, *line.split(), **variables)
    else:
        answer, notes, code = run_here(line, **variables)
    assert code == 0, notes
    assert hub.token not in answer + notes + (tmp_path / "plan.json").read_text()
    assert not any("authorization" in request.headers for request in hub.requests if request.route == "cdn")
    kept = [path.read_bytes() for path in (tmp_path / "cache/bigload").rglob("*") if path.is_file()]
    assert not any(hub.token.encode() in content for content in kept)


WORK = {
    "inspect": "inspect org/tiny --json --shards",
    "plan": "plan org/tiny -m cpu=1GiB -o plan.json",
    "dry run": "fetch org/tiny whole --dry-run",
    "fetch": "fetch org/tiny whole",
    "fetch a part": "fetch org/tiny part --only lm_head --json",
    "reshard": "reshard org/tiny shards --layout shards",
    "verify": "verify org/tiny",
}
WRONG = "hf_" + "w" * 34


@pytest.mark.parametrize("token", ["right", "wrong", "none"])
def test_what_is_gated_opens_with_the_token_which_nothing_that_is_written_has(hub, tmp_path, run_here, token):
    hub.repositories["org/tiny"].gated = True
    variables = {"right": {"HF_TOKEN": hub.token}, "wrong": {"HF_TOKEN": WRONG}, "none": {}}[token]
    expected = {"right": "", "wrong": "Invalid credentials", "none": "the repository is gated"}[token]
    hint = {"right": "", "wrong": "correct or unset HF_TOKEN", "none": "log in (hf auth login) or set HF_TOKEN"}[token]
    written = []
    for name, words in WORK.items() if token == "right" else [("plan", WORK["plan"]), ("fetch", WORK["fetch"])]:
        telling = {"BIGLOAD_DEBUG": "1", "HF_DEBUG": "1", **variables}
        if (name, token) == ("fetch", "right"):  # as a program: HF_DEBUG is read at import
            answer, notes, (code, _) = run(hub, tmp_path, *words.split(), **telling)
        else:
            answer, notes, code = run_here(words, **telling)
        assert code == (2 if name == "verify" else 0 if token == "right" else 1), notes
        assert (expected in notes, hint in notes) == (True, True)
        written += [answer, notes]
    if token == "right":  # interrupted, and refused from then on
        hub.fault("cdn", file="00002-of-00003.safetensors", times=-1, status=403)
        _, notes, code = run_here("fetch org/tiny half --threads 1", **variables)
        assert (code, list((tmp_path / "half.partial").iterdir()) != []) == (1, True)
        written.append(notes)
    assert secrets_below(tmp_path, [hub.token, WRONG]) == []
    assert not [text for text in written if hub.token in text or WRONG in text]
    assert not any("authorization" in request.headers for request in hub.requests if request.route == "cdn")


FAULTS = [
    {"route": "api", "status": 403},
    {"route": "resolve", "status": 401},
    {"route": "resolve", "file": ".json", "status": 404},
    {"route": "resolve", "headers": {"Location": "/org/none/resolve/main/x?Signature=secret"}},
    {"route": "cdn", "status": 403},
    {"route": "cdn", "no_ranges": True},
    {"route": "cdn", "gzip": True},
    {"route": "cdn", "headers": {"Content-Range": "bytes 5-6/7"}},
]


SECRETS = ["hf_" + "x" * 34, "Signature", "my-password"]
TELLING = {"HF_TOKEN": SECRETS[0], "HF_DEBUG": "", "BIGLOAD_DEBUG": "1", "NO_PROXY": "127.0.0.1"}
TELLING["HTTPS_PROXY"] = "http://user:my-password@127.0.0.1:9"


def secrets_below(folder, secrets=SECRETS):
    written = [path for path in folder.rglob("*") if path.is_file() and folder / "here" not in path.parents]
    try:
        texts = {path: path.read_bytes() + str(path).encode() for path in written}
    except FileNotFoundError:  # a thread that outlives a failed command has renamed a header that it cached
        return secrets_below(folder, secrets)
    return [path for path, text in texts.items() for secret in secrets if secret.encode() in text]


def test_no_token_and_no_signature_is_in_a_text_or_a_file(hub, tmp_path, run_here):
    for line in ("fetch org/tiny out --json", "plan org/tiny -m cpu=1GiB -o plan.json", "reshard org/tiny shards"):
        answer, notes, code = run_here(line, **TELLING)
        assert code == 0, notes
        assert not [secret for secret in SECRETS if secret in answer + notes], (line, answer, notes)
    assert secrets_below(tmp_path) == []


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_no_token_and_no_signature_is_told_with_a_failure(hub, tmp_path, run_here, fault):
    hub.fault(times=-1, **fault)
    answer, notes, _ = run_here("fetch org/tiny out --json", **TELLING)
    assert not [secret for secret in SECRETS if secret in answer + notes], (answer, notes)
    assert secrets_below(tmp_path) == []


def test_the_proxy_of_a_connection_that_fails_is_named_by_its_variable(hub, tmp_path):
    _, notes, end = run(hub, tmp_path, "inspect", "org/tiny", HTTP_PROXY="http://user:my-password@127.0.0.1:9")
    assert (end[0], "my-password" in notes) == (1, False)
    assert f"connection to {hub.url.removeprefix('http://')} by the proxy of HTTP_PROXY failed: " in notes
    assert not hub.requests


def test_the_next_command_has_the_name_that_the_user_gave(run_here):
    answer, _, _ = run_here("inspect org/tiny")
    assert "Next: bigload plan org/tiny -m" in answer


def test_a_token_is_not_sent_where_that_is_switched_off(hub, tmp_path):
    run(hub, tmp_path, "inspect", "org/tiny", HF_TOKEN=hub.token, HF_HUB_DISABLE_IMPLICIT_TOKEN="1")
    assert hub.requests
    assert not any("authorization" in request.headers for request in hub.requests)


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", pytest.param("TRANSFORMERS_OFFLINE", marks=pytest.mark.slow)])
def test_offline_nothing_is_sent_and_what_was_read_is_known(hub, tmp_path, run_here, variable):
    offline = {"HF_HUB_OFFLINE": "", variable: "1"}
    _, notes, end = run(hub, tmp_path, "inspect", "org/tiny", **offline)
    assert (end[0], "offline mode is on" in notes) == (2, True)
    assert not hub.requests
    assert run_here("inspect org/tiny")[2] == 0
    hub.requests.clear()
    assert run(hub, tmp_path, "plan", "org/tiny", "-m", "cpu=1GiB", **offline)[2] == [0, []]
    assert not hub.requests


def test_ctrl_c_does_not_wait_for_headers(hub, tmp_path):
    answering, is_over = threading.Barrier(4), threading.Event()
    hub.fault("cdn", times=-1, pause=lambda: (answering.wait(), is_over.wait()))
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **hub.environment(tmp_path / "cache")}
    command = [sys.executable, "-m", "bigload_cli", "inspect", "org/tiny"]
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE) as process:
        answering.wait()  # all three shards
        process.send_signal(signal.SIGINT)
        code = process.wait()
    is_over.set()
    assert code == 130
    assert hub.counts["cdn"] == 3  # nothing was asked for again, as it would be after a time-out


def test_remote_headers_that_take_long_are_counted_on_a_terminal(hub, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(output, "SHOWN_AFTER_SECONDS", 0)
    monkeypatch.setattr(output, "_write", lambda text, _stream: shown.append(text))
    monkeypatch.setattr(output.sys.stderr, "isatty", lambda: True, raising=False)
    output.open_shown(str(tmp_path / "source"), quiet=False)
    assert shown == []
    output.open_shown("org/tiny", quiet=False)
    assert ["read 1 of 3 headers" in text for text in shown] == [True, False, False, False]
    assert "read 3 of 3 headers" in shown[2]


def test_a_folder_that_was_uploaded_is_verified_without_torch(hub, tmp_path, run_here):
    assert run_here("fetch org/tiny copy -q")[2] == 0
    hub.add("me/copy", tmp_path / "copy")
    answer, _, end = run(hub, tmp_path, "verify", "me/copy")
    assert (end, "every byte is as it was written" in answer) == ([0, []], True)
    shard = next((tmp_path / "copy").glob("*-00002-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    commit = hub.add("me/copy", tmp_path / "copy").commit
    answer, notes, code = run_here(f"verify me/copy@{commit} --json")
    assert (code, "is not what was written: 1 problem in 1 file" in notes) == (1, True)
    document = json.loads(answer)
    assert document["folder"] == f"hf://me/copy@{commit}"
    assert [problem["file"] for problem in document["problems"]] == [shard.name]


def test_a_model_without_manifest_is_told_what_checks_it(run_here):
    answer, notes, code = run_here("verify org/tiny")
    assert (answer, code) == ("", 2)
    assert "no bigload-manifest.json in it" in notes
    assert "hint: the service knows SHA-256 of 3 files: bigload fetch hf://org/tiny@" in notes


def test_bench_load_takes_a_repository(run_here):
    answer, notes, code = run_here("bench-load org/tiny --runs 1 --threads 1 --json")
    assert code == 0, notes
    assert json.loads(answer)["schema"].startswith("bigload.bench-load/")
