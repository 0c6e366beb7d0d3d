"""Answers to questions as the program shows them: lines, a table, and documents that their schemas describe."""

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from bigload.planning.budget.budget import MemoryBudget
from bigload.planning.choices import Policy
from bigload.planning.model.structure import read_structure
from bigload.planning.options import options_of
from bigload.planning.planner import plan_details
from bigload.planning.questions.compare import compare
from bigload.planning.questions.explain import explain
from bigload.planning.questions.max_context import max_context
from bigload.planning.questions.sizing import fits, gpus
from bigload_cli.views import questions
from builders import checkpoint_of, llama_config, llama_tensors

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"
CONFIG = {**llama_config(), "num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 4, "vocab_size": 32}
TINY = checkpoint_of(llama_tensors(), config=CONFIG)
EMPTY = checkpoint_of({})
OPTIONS = options_of(overhead=0, context=10)
BUDGET = MemoryBudget.of({"cuda:0": "4KiB", "cuda:1": "4KiB", "cpu": "1MiB"})


def explained(name):
    return questions.of_explanation(explain(plan_details(TINY, BUDGET, OPTIONS), name), "tiny")


def compared(budget):
    return questions.of_comparison(compare(read_structure(TINY, OPTIONS), budget, OPTIONS, list(Policy)), "tiny")


def sized(checkpoint, count=1):
    return questions.of_least_memory(
        fits(read_structure(checkpoint, OPTIONS), OPTIONS, [count]), "tiny", OPTIONS.workload
    )


def needs(checkpoint, size):
    answer = gpus(read_structure(checkpoint, OPTIONS), OPTIONS, size)
    return questions.of_gpu_needs(answer, "tiny", OPTIONS.workload)


def longest(checkpoint, budget):
    return questions.of_longest_context(max_context(read_structure(checkpoint, OPTIONS), budget, OPTIONS), "tiny")


DOCUMENTS = {
    "explain a block": lambda: explained("layers.3"),
    "explain the first module": lambda: explained("embed_tokens"),
    "explain many": lambda: explained("model"),
    "compare": lambda: compared(BUDGET),
    "compare on the cpu": lambda: compared(MemoryBudget.of({"cpu": "1MiB"})),
    "compare what does not fit": lambda: compared(MemoryBudget.of({"cpu": 5}, use_disk=False)),
    "fits": lambda: sized(TINY),
    "fits, empty": lambda: sized(EMPTY),
    "gpus": lambda: needs(TINY, 4400),
    "gpus, too small": lambda: needs(TINY, 5),
    "gpus, empty": lambda: needs(EMPTY, 5),
    "max-context": lambda: longest(TINY, BUDGET),
    "max-context, without limit": lambda: longest(EMPTY, BUDGET),
}


def strict(node: dict) -> dict:
    """Return a schema that knows no other keys than those it names."""
    copied = {key: strict(value) if isinstance(value, dict) else value for key, value in node.items()}
    return {**copied, "additionalProperties": False} if "properties" in node and "type" in node else copied


@pytest.mark.parametrize("what", DOCUMENTS)
def test_a_document_is_what_its_schema_describes(what):
    document = json.loads(json.dumps(DOCUMENTS[what](), allow_nan=False))
    name = what.split()[0].rstrip(",")
    assert document["schema"] == f"bigload.{name}/1.0"
    described = json.loads((SCHEMAS / f"{name}-1.0.json").read_text(encoding="utf-8"))
    Draft202012Validator(strict(described)).validate(document)
    assert document.keys() == set(described["required"])


def test_the_answers_that_the_documents_hold_are_those_of_the_library():
    assert [row["num_gpus"] for row in DOCUMENTS["gpus"]()["with_ram"]] == [3, 1]
    assert DOCUMENTS["gpus, too small"]()["without_offload"] is None
    assert [row["fits"] for row in DOCUMENTS["compare what does not fit"]()["policies"]] == [False] * len(Policy)
    assert DOCUMENTS["max-context, without limit"]()["most_tokens"] is None


def test_lines_hold_nothing_that_a_terminal_obeys():
    name = "a\n\x1b[2J"
    checkpoint = checkpoint_of({f"{name}.weight": 5, "b.weight": 50})
    answer = explain(plan_details(checkpoint, MemoryBudget.of({"cuda:0": 60, "cpu": 60}), OPTIONS), "b")
    lines = questions.explanation(answer)
    assert all(line.isprintable() for line in lines)
    large = checkpoint_of({f"{name}.weight": 500, "b.weight": 50})
    structure = read_structure(large, OPTIONS)
    told = [*questions.least_memory(fits(structure, OPTIONS)), *questions.gpu_needs(gpus(structure, OPTIONS, 520))]
    assert all(line.isprintable() for line in told)
    assert any(r"\x1b[2J" in line for line in told)


def test_the_first_line_is_the_answer():
    structure = read_structure(TINY, OPTIONS)
    for line in (
        questions.least_memory(fits(structure, OPTIONS))[0],
        questions.gpu_needs(gpus(structure, OPTIONS, 4096))[0],
        questions.longest_context(max_context(structure, BUDGET, OPTIONS))[0],
    ):
        assert line.startswith(("smallest memory per GPU", "needs ", "largest context"))


def test_the_table_has_a_row_per_policy_and_says_which_do_not_fit():
    options = options_of(overhead=0)
    structure = read_structure(TINY, options)
    text = questions.comparison(compare(structure, BUDGET, options, list(Policy))).as_text()
    assert [line.split()[0] for line in text.splitlines()[1:]] == [str(policy) for policy in Policy]
    small = MemoryBudget.of({"cpu": 5}, use_disk=False)
    assert "does not fit" in questions.comparison(compare(structure, small, options, [])).as_text()
