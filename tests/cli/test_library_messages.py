import io
import logging
import warnings

import pytest

from bigload_cli.library_messages import silent_libraries

tqdm = pytest.importorskip("tqdm")


def bar():
    shown = io.StringIO()
    list(tqdm.tqdm(range(3), disable=False, file=shown))
    return shown.getvalue()


def test_libraries_write_nothing_until_the_command_is_done(capfd):
    with silent_libraries():
        logging.getLogger("a.library").warning("of a library")
        warnings.warn("of a library", stacklevel=1)
        assert not bar()
    assert "of a library" not in capfd.readouterr().err
    assert "3/3" in bar()


def test_all_is_shown_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("BIGLOAD_DEBUG", "1")
    with silent_libraries():
        assert "3/3" in bar()
