"""GGUF checkpoints in several files, which llama.cpp's `gguf-split` names `NAME-00001-of-00003.gguf`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from bigload.checkpoint.model import Shard
from bigload.errors import Problem

MAX_FILES = 10_000
_NAME = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")


def split_files(file: str) -> list[str]:
    """Return the names of all files of the checkpoint that `file` is a part of, in order; itself if it is no part."""
    found = _NAME.fullmatch(file)
    if found is None or not 1 <= int(found[2]) <= int(found[3]) <= MAX_FILES:
        return [file]
    return [f"{found[1]}-{number:05}-of-{found[3]}.gguf" for number in range(1, int(found[3]) + 1)]


def split_problems(shards: Sequence[Shard], num_tensors: int, *, is_whole: bool) -> Iterator[Problem]:
    """Yield where GGUF files contradict their names, each other, or (if all could be read) the number of tensors."""
    for shard in shards:
        if shard.format != "gguf":
            continue
        files = split_files(shard.file)
        said = {key: shard.metadata.get(f"split.{key}") for key in ("no", "count", "tensors.count")}
        expected = {"no": files.index(shard.file), "count": len(files)}
        if is_whole:
            expected["tensors.count"] = num_tensors
        for key, value in expected.items():
            is_part = len(files) > 1 or said["count"] not in (None, "0", "1")
            if is_part and said[key] != str(value):
                text = f"split.{key} is {said[key]!r:.50}, expected {value}: name every file as gguf-split did"
                yield Problem(code="wrong-split", file=shard.file, text=text)
