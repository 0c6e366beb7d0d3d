"""llama.cpp itself, in a process of its own: the tokens that it finds, and the answer that it gives."""

import json
import subprocess
import sys

import pytest

SECONDS = 600
"""For one model: seconds on an idle machine, minutes beside other work."""

_PROGRAM = """
import json, sys, urllib.request
import xllamacpp

parameters = xllamacpp.CommonParams()
parameters.model.path, parameters.n_ctx, parameters.port, parameters.warmup = sys.argv[1], 256, 0, False
parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
server = xllamacpp.Server(parameters)
def ask(path, **content):
    body = json.dumps(content).encode()
    request = urllib.request.Request(server.listening_address + path, data=body)
    return json.load(urllib.request.urlopen(request))
ids = [ask("/tokenize", content=text, add_special=True)["tokens"] for text in json.loads(sys.argv[2])]
text = ask("/completion", prompt=ids[0], n_predict=int(sys.argv[3]), temperature=0)["content"]
print("\\n" + json.dumps([ids, text]))
"""


def ask(file, texts, *, num_tokens=8):
    """Return the tokens of all `texts`, and the greedy answer to the first."""
    ran = _run(file, texts, num_tokens)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def is_refused(file):
    """Return whether llama.cpp does not load the model, or aborts."""
    return _run(file, ["a"], 1).returncode != 0


def _run(file, texts, num_tokens):
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    command = [sys.executable, "-c", _PROGRAM, str(file), json.dumps(texts), str(num_tokens)]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
