"""The pictures of README and docs are those that their script makes, small, and without a trace of who made them."""

import re
import socket
import sys
from importlib import util
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
DOCUMENTS = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
LIMITS = {".svg": 100_000, ".png": 200_000}


def script():
    found = util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    module = util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module


def test_documents_show_what_the_script_makes_and_nothing_else_is_kept():
    shown = {
        (document.parent / link).resolve()
        for document in DOCUMENTS
        for link in re.findall(r"!\[[^\]]+\]\(([^)]*pictures/[^)]+)\)", document.read_text())
    }
    made = {(PICTURES / name).resolve() for name in script().names()}
    assert shown == made == {each.resolve() for each in PICTURES.iterdir()}


def test_pictures_are_small_and_load_nothing():
    for picture in PICTURES.iterdir():
        assert picture.stat().st_size < LIMITS[picture.suffix]
        if picture.suffix == ".svg":
            text = picture.read_text()
            assert not re.search(r"url\([\"']?(?!#)", text)
            assert not [word for word in ("/root", "/tmp", "/home", socket.gethostname()) if word in text]


def test_a_recording_shows_the_command_and_what_it_prints(tmp_path, monkeypatch):
    pictures = script()
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    pictures.record(pictures.Recording(name="version", command="bigload --version"), tmp_path)
    text = (tmp_path / "version.svg").read_text().replace("&#160;", " ")
    assert "bigload --version" in text
    assert re.search(r"bigload \d+\.\d+", text)
