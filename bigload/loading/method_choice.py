from __future__ import annotations

from dataclasses import dataclass

from bigload.loading.methods import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    method: Method
    reason: str


def choose(ranges, method, *, threads):
    return Choice(method=Method.READ if method is Method.AUTO else method, reason="temporary")
