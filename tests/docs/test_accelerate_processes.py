"""docs/accelerate.md has every function of process control, by the names of accelerate's methods and properties."""

import re
from pathlib import Path

import bigload

PAGE = (Path(__file__).parents[2] / "docs" / "accelerate.md").read_text()
MODULES = ("barriers", "main_process_first", "on_process", "process_index", "process_state", "saving", "splitting")


def test_the_page_names_all_functions_of_process_control_and_no_others():
    section = PAGE.partition("## `PartialState` and `Accelerator`")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert sorted(named) == sorted(
        name for module in MODULES for name in bigload._MODULES[f"bigload.distributed.{module}"].split()
    )
