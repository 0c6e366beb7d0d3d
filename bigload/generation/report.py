"""Answers of a model and what they cost, as values and as plain JSON (`bigload.run/1.0`)."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from bigload.documents import fields
from bigload.runtime.streaming.run_log import ForwardStats

if TYPE_CHECKING:
    from bigload.planning.timing.predict import Prediction


class Finish(StrEnum):
    """End of an answer: by itself, at the number of tokens it could have, or because a user stopped it."""

    END = "end"
    LENGTH = "length"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer, in tokens and as text, and its times.

    Attributes:
        prompt_tokens: Length of the prompt, with the conversation before it.
        cached_tokens: Those of them that were in the KV cache of the turn before.
        finish: Why it ended.
        seconds: From the prompt to the last token.
        first_token_seconds: From the prompt to the first token; `None` where there is none, as of an encoder.
        forwards: What streaming did in each forward, of a long answer the last ones; `None` where nothing streams.
        label: The `id` of the prompt.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    tokens: tuple[int, ...]
    text: str
    finish: Finish
    seconds: float
    first_token_seconds: float | None
    forwards: tuple[ForwardStats, ...] | None
    label: object = None

    @property
    def tokens_per_second(self) -> float | None:
        """The rate after the first token; `None` without a second one."""
        if self.first_token_seconds is None or len(self.tokens) < 2:
            return None
        return (len(self.tokens) - 1) / max(self.seconds - self.first_token_seconds, 1e-9)


class RunReport(NamedTuple):
    """A run of a model.

    Attributes:
        path: The checkpoint path as given.
        model_class: The class in transformers.
        disk_bytes: Those of the `total_bytes` of all tensors that the plan leaves on disk.
        num_threads: Threads that torch computes with.
        device: The device that runs streamed modules.
        context: Tokens of a prompt and its answer together.
        seed: Of the random numbers, `None` where the most likely token is taken.
        load_seconds: From the empty model to the dispatched one.
        peak_private_bytes: The most private memory above that before the load; `None` where it was not sampled.
        whole_experts: See `RunStats`.
        prediction: What the plan was to take on this machine; `None` where it has not been measured.
        cached_fraction: Part of the files, 0 to 1, that was in the page cache before the load; the prediction is for 0.
    """

    path: str
    model_class: str
    total_bytes: int
    disk_bytes: int
    num_threads: int
    device: str
    context: int
    seed: int | None
    load_seconds: float
    peak_private_bytes: int | None
    answers: tuple[Answer, ...]
    whole_experts: tuple[str, ...] = ()
    prediction: Prediction | None = None
    cached_fraction: float | None = None

    @property
    def median_seconds(self) -> float:
        """Return the median time of an answer."""
        return statistics.median(answer.seconds for answer in self.answers)


_PREDICTED = ("load_seconds", "first_token_seconds", "token_seconds", "prompt_tokens", "bound_by", "profile_name")


def run_document(report: RunReport) -> dict[str, object]:
    """Return the report for `run --json`."""
    return {
        "schema": "bigload.run/1.0",
        **fields(report, "path", "model_class", "total_bytes", "disk_bytes", "num_threads", "device"),
        **fields(report, "context", "seed", "load_seconds", "peak_private_bytes"),
        "prediction": None if report.prediction is None else fields(report.prediction, *_PREDICTED),
        "cached_fraction": report.cached_fraction,
        "answers": [
            {
                **answer_document(answer),
                "forwards": None if answer.forwards is None else list(map(_of_forward, answer.forwards)),
            }
            for answer in report.answers
        ],
    }


def answer_document(answer: Answer) -> dict[str, object]:
    """Return an answer for a line of `run --file`."""
    return {
        "id": answer.label,
        "text": answer.text,
        "finish": str(answer.finish),
        **fields(answer, "prompt_tokens", "cached_tokens"),
        "new_tokens": len(answer.tokens),
        **fields(answer, "seconds", "first_token_seconds", "tokens_per_second"),
    }


def _of_forward(forward: ForwardStats) -> dict[str, object]:
    return {
        "run_seconds": forward.seconds,
        "disk_read_bytes": forward.bytes_from_disk,
        "ram_read_bytes": forward.bytes_from_ram,
        **fields(forward, "wait_seconds", "fetch_seconds", "overlap"),
        "peak_weight_bytes": forward.peak_bytes,
    }
