"""Predictions of plans in JSON documents."""

from __future__ import annotations

from dataclasses import asdict

from bigload.planning.timing.predict import Prediction


def of_prediction(found: Prediction) -> dict[str, object]:
    """Return the prediction as plain JSON values."""
    document = {**asdict(found), "tokens_per_second": found.tokens_per_second}
    document["steps"] = [step._asdict() for step in found.steps]
    return document
