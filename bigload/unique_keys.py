"""Refuse JSON objects in which a key occurs twice: readers would disagree on which of the values counts."""

from __future__ import annotations


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object; for `object_pairs_hook` of `json.loads`.

    Raises:
        ValueError: a key occurs twice.
    """
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r:.100} occurs twice")
        found[key] = value
    return found
