"""Reshards that die, at every step that they ask of the system: by SIGKILL, or because the system refuses it.

As a program it is one prepared interpreter that forks a child for each death, as `test_reshard_crash.py` asks.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bigload.errors import BigloadError
from bigload.layouts.resharding import rank_share
from bigload.layouts.resharding.reshard import reshard
from bigload.layouts.writing import files_in_progress as files_module
from bigload.layouts.writing import output_file_writer as sink_module
from bigload.layouts.writing import writer as writer_module
from builders import contents

CALLS = (
    *("open", "pwrite", "preadv", "write", "fsync", "fdatasync", "ftruncate"),
    *("rename", "unlink", "mkdir", "rmdir", "link", "symlink"),
)
"""Of `os`; `fallocate` goes by way of libc."""

Act = Callable[[int, str], None]
"""Told the number of a step, from 1 on, and what it is: a call's name, with `-done` after it has returned."""


def small_steps(*, window_bytes: int = 16384, note_every_bytes: int = 32768) -> None:
    """Cut the work of this process into many small steps."""
    writer_module.WINDOW_BYTES = window_bytes
    files_module.NOTE_EVERY_BYTES = note_every_bytes


@contextmanager
def watched(act: Act) -> Iterator[None]:
    """Call `act` before and after each of `CALLS` of this process; what it raises is what the call raises."""
    originals = {name: getattr(os, name) for name in CALLS}
    fallocate = sink_module._libc_fallocate
    seen = 0

    def step(name: str) -> None:
        nonlocal seen
        seen += 1
        act(seen, name)

    def around(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def watched_call(*arguments: object, **options: object) -> object:
            step(name)
            result = call(*arguments, **options)
            step(f"{name}-done")
            return result

        return watched_call

    for name, call in originals.items():
        setattr(os, name, around(name, call))
    sink_module._libc_fallocate = around("fallocate", fallocate)
    try:
        yield
    finally:
        sink_module._libc_fallocate = fallocate
        for name, call in originals.items():
            setattr(os, name, call)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A way to reshard `source` to `out`, and the folder of an older output that it replaces."""

    source: Path
    out: Path
    threads: int = 1
    verify: str = "full"
    is_direct: bool = True
    older: Path | None = None
    max_shard_bytes: int | None = 60_000

    def run(self) -> None:
        if not self.is_direct:
            rank_share.direct_write_alignment = lambda folder, *, rank=0: None
        reshard(
            self.source,
            self.out,
            threads=self.threads,
            verify=self.verify,
            resume=True,
            force=self.older is not None,
            max_shard_bytes=self.max_shard_bytes,
        )

    def begin(self) -> None:
        """Make the folder of `out` as it is before the first run."""
        shutil.rmtree(self.out.parent, ignore_errors=True)
        self.out.parent.mkdir()
        if self.older is not None:
            shutil.copytree(self.older, self.out)


def in_child(case: Case, act: Act | None, *, kill_after: float | None = None) -> str:
    """Run `case` in a child; return how it ended: `done`, `killed`, or the name of bigload's own error."""
    child = os.fork()
    if child == 0:
        os._exit(_ending(case, act))
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return "killed"
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 3), f"exit code {code}"
    return "done" if code == 0 else "refused"


def _ending(case: Case, act: Act | None) -> int:
    signal.alarm(60)  # a run that waits for itself
    try:
        if act is None:
            case.run()
        else:
            with watched(act):
                case.run()
    except BigloadError:
        return 3
    except BaseException:
        traceback.print_exc()
        return 4
    return 0


def kill_at(number: int) -> Act:
    def act(step: int, name: str) -> None:
        if step == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def refuse_at(number: int, code: int, *, forever: bool) -> Act:
    """Let the step fail, or it and all later ones that write: a full disk stays full."""

    def act(step: int, name: str) -> None:
        is_write = name in ("pwrite", "write", "fallocate", "mkdir")
        if not name.endswith("-done") and (step == number or (forever and step > number and is_write)):
            raise OSError(code, os.strerror(code))

    return act


def steps_of(case: Case) -> list[str]:
    """Run `case` once to its end in this process, and return its steps."""
    case.begin()
    steps: list[str] = []
    with watched(lambda number, name: steps.append(name)):
        case.run()
    return steps


def check(case: Case, expected: dict[str, bytes]) -> None:
    """Raise unless what stands under the final name is complete, and no index names a file that is not."""
    if case.out.exists():
        older = None if case.older is None else contents(case.older)
        found = published(case.out)
        assert found in (expected, older), sorted(found)
    sizes = {name: len(content) for name, content in expected.items()}
    partial = case.out.with_name("out.partial")
    for index in partial.rglob("*.index.json"):
        folder = index.parent.relative_to(partial)
        for file in set(json.loads(expected[str(folder / index.name)])["weight_map"].values()):
            assert (index.parent / file).stat().st_size == sizes[str(folder / file)], f"{index} without {file}"


def published(out: Path) -> dict[str, bytes]:
    """Return what is in `out` but for journals, which are removed after it was published."""
    return {name: content for name, content in contents(out).items() if not name.startswith(".bigload-journal-")}


def die_often(cases: list[Case], deaths: int, seed: int) -> dict[str, int]:
    """Have the cases die `deaths` times, a few in a row, and then finish; return how often they ended in which way."""
    choose = random.Random(seed)
    counts = {"killed": 0, "refused": 0, "done": 0, "finished": 0}
    prepared = []
    for case in cases:
        names = steps_of(case)
        prepared.append((case, names, contents(case.out)))
    while counts["killed"] + counts["refused"] < deaths:
        case, names, expected = choose.choice(prepared)
        case.begin()
        story = []
        for _ in range(choose.randrange(1, 5)):
            number = choose.randrange(1, len(names) + 1)
            way = choose.choice(("kill", "kill", "delay", "refuse"))
            story.append((way, number, names[number - 1]))
            ended = _die(case, way, number, choose)
            counts[ended] += 1
            try:
                check(case, expected)
            except AssertionError as error:
                raise AssertionError(f"{case} {story}: {error}") from error
            if ended == "done":
                break
        ended = in_child(case, None)
        assert ended == "done", f"{case} {story}: {ended}"
        assert contents(case.out) == expected, f"{case} {story}"
        left = sorted(path.name for path in case.out.parent.iterdir())
        assert left == ["out"], f"{case} {story}: {left}"
        counts["finished"] += 1
    return counts


def _die(case: Case, way: str, number: int, choose: random.Random) -> str:
    if way == "kill":
        return in_child(case, kill_at(number))
    if way == "delay":
        return in_child(case, None, kill_after=choose.random() * 0.08)
    code = choose.choice((errno.ENOSPC, errno.EIO))
    return in_child(case, refuse_at(number, code, forever=code == errno.ENOSPC))


def die_everywhere(case: Case, every: int) -> dict[str, int]:
    """Be killed at every `every`-th step, and gone on with each time."""
    names = steps_of(case)
    expected = contents(case.out)
    counts = {"killed": 0, "published": 0}
    for number in range(1, len(names) + 1, every):
        case.begin()
        assert in_child(case, kill_at(number)) == "killed", f"{case}: step {number}, {names[number - 1]}"
        check(case, expected)
        counts["killed"] += 1
        counts["published"] += case.older is None and case.out.exists()
        assert in_child(case, None) == "done", f"{case}: step {number}, {names[number - 1]}"
        assert contents(case.out) == expected, f"{case}: step {number}, {names[number - 1]}"
        assert [path.name for path in case.out.parent.iterdir()] == ["out"], f"{case}: step {number}"
    return counts


def die_at_the_end(case: Case) -> dict[str, int]:
    """Be killed when all is written, and nothing is published."""
    names = steps_of(case)
    case.begin()
    assert in_child(case, kill_at(names.index("rename") + 1)) == "killed"
    return {"killed": 1}


def main() -> None:
    asked = json.loads(sys.argv[1])
    small_steps()
    cases = [
        Case(
            source=Path(each.pop("source")),
            out=Path(each.pop("out")),
            older=Path(older) if (older := each.pop("older", None)) else None,
            **each,
        )
        for each in asked["cases"]
    ]
    if asked["what"] == "often":
        counts = die_often(cases, asked["deaths"], asked["seed"])
    elif asked["what"] == "everywhere":
        counts = die_everywhere(cases[0], asked["every"])
    else:
        counts = die_at_the_end(cases[0])
    sys.stdout.write(json.dumps(counts))


if __name__ == "__main__":
    main()
