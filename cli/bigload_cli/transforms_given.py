"""Transforms of the command line, in the order in which their options were given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import typer
from typer.core import TyperCommand

from bigload.errors import OptionError

if TYPE_CHECKING:
    from bigload.layouts.transforms.transform import Transform

_OPTIONS = "bigload.options"


class OrderedCommand(TyperCommand):
    """Command that remembers which options came in which order, each as often as it was given."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # typer's own click
        """Remember the options of `args`, and parse them as every command does."""
        given = self.make_parser(ctx).parse_args(list(args))[2]
        ctx.meta[_OPTIONS] = [each.opts[0] for each in given]
        return super().parse_args(ctx, args)


def check_once(ctx: typer.Context, options: Iterable[str]) -> None:
    """Raise if one of `options` was given several times, of which the parser keeps the last value only."""
    for option in options:
        count = ctx.meta[_OPTIONS].count(option)
        if count > 1:
            raise OptionError(f"{option} is given {count} times; expected once: it has one value")


def transforms_given(
    ctx: typer.Context, made_by: Mapping[str, tuple[Sequence[str], Callable[[str], Transform]]]
) -> Iterator[Transform]:
    """Yield a transform for each value of the options in `made_by`, in the order of the command line."""
    left = {option: iter(values) for option, (values, _) in made_by.items()}
    for option in ctx.meta[_OPTIONS]:
        if option in left and (value := next(left[option], None)) is not None:
            yield made_by[option][1](value)


def check_beside(option: str, value: str | None, depending: Mapping[str, Sequence[str] | None]) -> None:
    """Raise if one of the options `depending` is given, and not `option`, without which it means nothing."""
    for other, given in depending.items():
        if given and value is None:
            raise OptionError.of(other, given, f"{option} along with it")


def metadata_given(texts: Sequence[str]) -> dict[str, str]:
    """Return what `--set-metadata KEY=VALUE` says."""
    found: dict[str, str] = {}
    for text in texts:
        key, divider, value = text.partition("=")
        if not key or not divider or key in found:
            raise OptionError.of("--set-metadata", text, "KEY=VALUE, each key once")
        found[key] = value
    return found
