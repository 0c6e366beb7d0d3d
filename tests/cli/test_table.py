"""Tables by themselves: what gives way when a terminal is narrow, and what never does."""

from rich.console import Console

from bigload.plain_text import PlainTable, Styled
from bigload_cli.views.table import MANY_ROWS, for_terminal, has_many_rows


def drawn(table, width):
    drawing, least = for_terminal(table, width)
    console = Console(width=least, color_system=None)
    with console.capture() as capture:
        console.print(drawing)
    return [line.rstrip() for line in capture.get().splitlines()]


def sample(holds="first, second, third"):
    table = PlainTable(("NAME", "SIZE", "USE", "HOLDS"), right=("SIZE",), folding="HOLDS", droppable="USE")
    table.add("cuda:0", "22.00 GiB", Styled("█" * 16, "cyan"), holds)
    return table


def test_a_wide_terminal_gets_what_a_pipe_gets():
    assert drawn(sample(), 200) == sample().as_text().splitlines()


def test_a_narrow_terminal_folds_between_words():
    assert [line.split()[-1] for line in drawn(sample(), 46)[1:]] == ["first,", "second,", "third"]


def test_the_bar_gives_way_to_long_names():
    lines = drawn(sample("language_model.model.embed_tokens"), 60)
    assert lines[0].split() == ["NAME", "SIZE", "HOLDS"]
    assert "language_model.model.embed_tokens" in lines[1]


def test_figures_are_never_cut():
    assert "22.00 GiB" in drawn(sample(), 5)[1]


def test_names_cannot_command_the_terminal():
    table = PlainTable(("TENSOR",))
    table.add("a\x1b[2Jb\nc")
    assert table.as_text() == "TENSOR\na\\x1b[2Jb\\nc\n"


def test_a_list_that_nobody_looks_at_is_not_drawn():
    table = PlainTable(("TENSOR",))
    for number in range(MANY_ROWS + 1):
        table.add(str(number))
    assert has_many_rows(table)
