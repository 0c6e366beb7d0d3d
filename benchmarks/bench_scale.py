"""Measure how cost grows when one thing grows: bytes, shards, tensors, blocks, devices, ranks.

    python benchmarks/bench_scale.py [--only AXIS] [--folder FOLDER] [--json scale.json] [--document docs/scale.md]

Every work runs in a process of its own, with a soft limit of 256 open descriptors. CPU time and peak of memory are
those of the work: the interpreter and its imports come before. Descriptors are counted every 2 ms. Checkpoints have
true headers and holes for data; they stay in FOLDER when it is named, and `--prepare` makes them and ends.

The exponent between two points is the slope of the line between them on logarithmic axes: 1 is a straight line. A row
is judged by its steepest slope in CPU time and in memory; points below a floor are fixed cost and judge nothing.
`--json` adds the rows to those of the file; `--document` writes table and pictures (matplotlib) from that file.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from bigload.dtypes import DTYPES
from bigload.units import GIB, MIB
from harness import machine, show_status
from make import Recipe, RecipeTensor, expand_braces, make

OUT = "out"
POLICIES = ("optimal", "sequential", "balanced", "balanced_low_0")
LIMIT = 1.15
FLOORS = {"cpu": 0.1, "memory": 8 * MIB}
SLOW_SECONDS = 5.0
_CHILD = Path(__file__).with_name("scale_child.py")
_BEGIN, _END = "<!-- measured -->", "<!-- end of measured -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a work took at one size of its axis; processes of one work are added, memory is that of the largest."""

    x: int
    cpu: float
    wall: float
    memory: int
    descriptors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A work measured along an axis."""

    axis: str
    work: str
    points: tuple[Point, ...]

    def slopes(self, measure: str) -> list[float]:
        """Return the exponents between successive points whose earlier one is above the floor."""
        floor = FLOORS[measure]
        pairs = [((one.x, getattr(one, measure)), (two.x, getattr(two, measure))) for one, two in pairwise(self.points)]
        return [math.log(y2 / y1) / math.log(x2 / x1) for (x1, y1), (x2, y2) in pairs if min(y1, y2) >= floor]

    @property
    def is_straight(self) -> bool:
        """Whether CPU time and memory grow as a straight line or slower."""
        return all(slope <= LIMIT for measure in FLOORS for slope in self.slopes(measure))


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthRun:
    """Processes to measure together: the kind of each, and its arguments."""

    kind: str
    processes: tuple[Mapping[str, object], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A work along an axis, not yet measured: `prepare` makes the run of one size, given the folder for scratch."""

    axis: str
    work: str
    xs: tuple[int, ...]
    prepare: Callable[[Path, int], GrowthRun]


def dense(name: str, *, layers: int, width: int, inner: int, shards: int, heads: int = 32) -> Recipe:
    """Return a decoder of the Llama family."""
    prefix = f"model.layers.{{0..{layers - 1}}}."
    forms = [
        ("model.embed_tokens.weight", (1024, width)),
        (f"{prefix}{{input,post_attention}}_layernorm.weight", (width,)),
        (f"{prefix}self_attn.{{q,k,v,o}}_proj.weight", (width, width)),
        (f"{prefix}mlp.{{gate,up}}_proj.weight", (inner, width)),
        (f"{prefix}mlp.down_proj.weight", (width, inner)),
        ("model.norm.weight", (width,)),
        ("lm_head.weight", (1024, width)),
    ]
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": inner,
    }
    return _recipe(
        name, forms, config | {"num_key_value_heads": heads}, layers=layers, width=width, shards=shards, heads=heads
    )


def mixture(name: str, *, layers: int, experts: int, shards: int) -> Recipe:
    """Return a mixture of experts with tiny weights."""
    width, inner = 64, 8
    prefix = f"model.layers.{{0..{layers - 1}}}."
    forms = [
        ("model.embed_tokens.weight", (1024, width)),
        (f"{prefix}{{input,post_attention}}_layernorm.weight", (width,)),
        (f"{prefix}self_attn.{{q,k,v,o}}_proj.weight", (width, width)),
        (f"{prefix}mlp.gate.weight", (experts, width)),
        (f"{prefix}mlp.experts.{{0..{experts - 1}}}.{{gate,up}}_proj.weight", (inner, width)),
        (f"{prefix}mlp.experts.{{0..{experts - 1}}}.down_proj.weight", (width, inner)),
        ("model.norm.weight", (width,)),
        ("lm_head.weight", (1024, width)),
    ]
    config: dict[str, object] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": inner,
    }
    config |= {"num_experts": experts, "num_experts_per_tok": 4, "num_key_value_heads": 4, "intermediate_size": inner}
    return _recipe(name, forms, config, layers=layers, width=width, shards=shards, heads=4)


def _recipe(
    name: str,
    forms: Iterable[tuple[str, tuple[int, ...]]],
    config: Mapping[str, object],
    *,
    layers: int,
    width: int,
    shards: int,
    heads: int,
) -> Recipe:
    bf16 = DTYPES["BF16"]
    tensors = tuple(
        RecipeTensor(name=each, dtype=bf16, shape=shape) for form, shape in forms for each in expand_braces(form)
    )
    common: dict[str, object] = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "vocab_size": 1024,
        "num_attention_heads": heads,
    }
    common |= {"head_dim": width // heads, "torch_dtype": "bfloat16", "tie_word_embeddings": False}
    whole = Recipe(name=name, about=name, config={**config, **common}, max_shard_bytes=1, tensors=tensors)
    largest = max(tensor.num_bytes for tensor in tensors)
    limit = whole.total_bytes if shards == 1 else max(largest, math.ceil(whole.total_bytes / shards))
    return Recipe(name=name, about=name, config=whole.config, max_shard_bytes=limit, tensors=tensors)


def made(folder: Path, recipe: Recipe) -> Path:
    """Return the checkpoint of `recipe` in `folder`, made if it is not there."""
    path = folder / recipe.name
    if not (path / "config.json").exists():
        show_status(f"making {recipe.name}")
        make(recipe, path)
    return path


def sized(folder: Path, gib: int) -> Path:
    """Return a checkpoint of so many GiB in 16 files, always with 64 blocks."""
    width = 1024 * math.isqrt(gib)
    inner = ((gib * GIB) // (2 * 64) - 4 * width**2) // (3 * width) // 64 * 64
    return made(folder, dense(f"{gib}gib", layers=64, width=width, inner=inner, shards=16))


def sharded(folder: Path, shards: int) -> Path:
    """Return a checkpoint of 1 GiB and 4,500 tensors in so many files."""
    return made(folder, dense(f"{shards}shards", layers=500, width=384, inner=384, shards=shards, heads=4))


def with_tensors(folder: Path, count: int) -> Path:
    """Return a checkpoint with about so many tensors in 64 blocks, most of them experts, and 16 files."""
    return made(folder, mixture(f"{count}tensors", layers=64, experts=round((count / 64 - 7) / 3), shards=16))


def with_blocks(folder: Path, count: int) -> Path:
    """Return a checkpoint with so many blocks of 9 tensors."""
    return made(folder, dense(f"{count}blocks", layers=count, width=32, inner=32, shards=16, heads=4))


def divisible(folder: Path, _: int) -> Path:
    """Return a checkpoint of 1 GiB that 64 ranks or devices can share."""
    return made(folder, dense("divisible", layers=128, width=512, inner=2048, shards=4, heads=64))


Make = Callable[[Path, int], Path]


def command(make_: Make, words: Callable[..., Sequence[str]], *more: str) -> Callable[[Path, int], GrowthRun]:
    """Return the preparation of a command; `words` are given the checkpoint, a path for its output, and the size."""

    def prepare(folder: Path, x: int) -> GrowthRun:
        return GrowthRun(kind="command", processes=({"words": [*words(make_(folder, x), folder / OUT, x), *more]},))

    return prepare


def loaded(make_: Make, method: str | None = None) -> Callable[[Path, int], GrowthRun]:
    """Return the preparation of a load of all tensors."""

    def prepare(folder: Path, x: int) -> GrowthRun:
        made(folder, dense("warm-up", layers=1, width=32, inner=32, shards=1, heads=4))
        return GrowthRun(kind="load", processes=({"path": str(make_(folder, x)), "method": method},))

    return prepare


def ranks(folder: Path, size: int) -> GrowthRun:
    """Return ranks that each load their rows."""
    path, meeting = str(divisible(folder, size)), str(folder / "meeting")
    each = ({"path": path, "rank": rank, "size": size, "meeting": meeting} for rank in range(size))
    return GrowthRun(kind="load_sharded", processes=tuple(each))


def inspect(path: Path, _: Path, __: int) -> Sequence[str]:
    """Return the words of `inspect`."""
    return ("inspect", str(path))


def plan(path: Path, _: Path, __: int) -> Sequence[str]:
    """Return the words of a plan for two accelerators and memory that hold three quarters of the weights."""
    quarter = stored_bytes(path) // 4
    return ("plan", str(path), "--overhead", "0", "-m", f"cuda:0={quarter},cuda:1={quarter},cpu={quarter}")


def plan_devices(path: Path, _: Path, count: int) -> Sequence[str]:
    """Return the words of a plan for so many accelerators, each a little smaller than the one before."""
    total = stored_bytes(path)
    sizes = [total * 9 // 10 // count * (200 - 20 * index // count) // 190 for index in range(count)]
    memory = ",".join(f"cuda:{index}={size}" for index, size in enumerate(sizes))
    return ("plan", str(path), "--overhead", "0", "-m", f"{memory},cpu={total}")


def reshard(path: Path, out: Path, _: int) -> Sequence[str]:
    """Return the words of a reshard into shards of the usual size."""
    return ("reshard", str(path), str(out), "-q", "--layout", "shards")


def reshard_shards(path: Path, out: Path, count: int) -> Sequence[str]:
    """Return the words of a reshard into so many files."""
    return (*reshard(path, out, count), "--max-shard-size", str(math.ceil(stored_bytes(path) / count)))


def reshard_tp(path: Path, out: Path, count: int) -> Sequence[str]:
    """Return the words of a reshard for so many ranks."""
    return ("reshard", str(path), str(out), "-q", "--tp", str(count))


def reshard_devices(folder: Path, count: int) -> GrowthRun:
    """Return a reshard for the devices of a plan, which is made here."""
    path, out, plan_file = divisible(folder, count), folder / OUT, folder / f"plan-{count}.json"
    words = [*plan_devices(path, out, count), "-q", "-o", str(plan_file)]
    plan_file.unlink(missing_ok=True)
    program = "from bigload_cli.app import main; main()"
    subprocess.run([sys.executable, "-c", program, *words], check=True, stdout=subprocess.DEVNULL)
    return GrowthRun(kind="command", processes=({"words": ["reshard", str(plan_file), str(out), "-q"]},))


def stored_bytes(path: Path) -> int:
    """Return the bytes of all shards."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def _verbs(axis: str, make_: Make, xs: tuple[int, ...], written: tuple[int, ...]) -> list[Series]:
    return [
        Series(axis=axis, work="inspect", xs=xs, prepare=command(make_, inspect)),
        Series(axis=axis, work="plan", xs=xs, prepare=command(make_, plan)),
        Series(axis=axis, work="load", xs=written, prepare=loaded(make_)),
        Series(axis=axis, work="load, mmap", xs=xs, prepare=loaded(make_, "mmap")),
        Series(axis=axis, work="reshard", xs=written, prepare=command(make_, reshard)),
    ]


def _policies(axis: str, make_: Make, words: Callable[..., Sequence[str]], xs: tuple[int, ...]) -> list[Series]:
    return [
        Series(axis=axis, work=f"plan, {policy}", xs=xs, prepare=command(make_, words, "--policy", policy))
        for policy in POLICIES
    ]


def _one_file(folder: Path, _: int) -> Path:
    return sharded(folder, 1)


_ONE, _TENS, _FOURS = (1, 10, 100, 1_000), (1_000, 10_000, 100_000, 1_000_000), (1, 4, 16, 64)
_BLOCKS = (100, 1_000, 10_000, 100_000)
SERIES = (
    *_verbs("GiB", sized, _FOURS, (1, 2, 4, 8)),
    *_verbs("shards", sharded, _ONE, _ONE),
    Series(axis="shards", work="reshard into shards", xs=_ONE, prepare=command(_one_file, reshard_shards)),
    *_verbs("tensors", with_tensors, _TENS, _TENS),
    Series(axis="tensors", work="plan, split", xs=_TENS, prepare=command(with_tensors, plan, "--experts", "split")),
    Series(axis="blocks", work="inspect", xs=_BLOCKS, prepare=command(with_blocks, inspect)),
    *_policies("blocks", with_blocks, plan, _BLOCKS),
    *_policies("devices", divisible, plan_devices, _FOURS),
    Series(
        axis="devices", work="plan, any order", xs=_FOURS, prepare=command(divisible, plan_devices, "--order", "any")
    ),
    Series(axis="devices", work="reshard of a plan", xs=_FOURS, prepare=reshard_devices),
    Series(axis="ranks", work="load_sharded", xs=(1, 2, 4, 8), prepare=ranks),
    Series(axis="ranks", work="reshard --tp", xs=_FOURS, prepare=command(divisible, reshard_tp)),
)


def measured(run: GrowthRun, folder: Path, x: int) -> Point:
    """Run the processes of `run` once, and return what they took."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        reports = [Path(scratch) / str(number) for number in range(len(run.processes))]
        with (Path(scratch) / "errors").open("wb") as errors:
            started = [
                subprocess.Popen(
                    [sys.executable, str(_CHILD), run.kind, json.dumps(arguments), str(report)],
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
                for arguments, report in zip(run.processes, reports, strict=True)
            ]
            descriptors = 0
            while any(process.poll() is None for process in started):
                descriptors = max(descriptors, *(open_descriptors(process.pid) for process in started))
                time.sleep(0.002)
        if any(process.returncode for process in started):
            raise SystemExit((Path(scratch) / "errors").read_text(encoding="utf-8"))
        taken = [json.loads(report.read_text(encoding="utf-8")) for report in reports]
    return Point(
        x=x,
        cpu=sum(each["cpu"] for each in taken),
        wall=max(each["wall"] for each in taken),
        memory=max(each["memory"] for each in taken),
        descriptors=descriptors,
    )


def open_descriptors(process_id: int) -> int:
    """Return how many descriptors a process has open, 0 when it has ended."""
    try:
        return sum(1 for _ in Path(f"/proc/{process_id}/fd").iterdir())
    except OSError:
        return 0


def median_point(series: Series, folder: Path, x: int, rounds: int) -> Point:
    """Measure one size so many times, once where that takes long, and return the medians."""
    points: list[Point] = []
    while len(points) < rounds and not (points and points[0].wall > SLOW_SECONDS):
        run = series.prepare(folder, x)
        show_status(f"{series.work}: {x} {series.axis}")
        points.append(measured(run, folder, x))
        for leftover in (OUT, "meeting"):
            shutil.rmtree(folder / leftover, ignore_errors=True)
            (folder / leftover).unlink(missing_ok=True)
    middle = {name: statistics.median_low([getattr(point, name) for point in points]) for name in Point.__slots__}
    return Point(**middle)


def table(rows: Iterable[Row]) -> str:
    """Return the rows as Markdown: what each point took, and the exponents between them."""
    lines = [
        "| grows | work | from … to | CPU time, s | exponents | memory, MiB | exponents | descriptors | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        points = row.points
        lines.append(
            f"| {row.axis} | {row.work} | {points[0].x:,} … {points[-1].x:,} | "
            f"{' '.join(f'{point.cpu:.2f}' for point in points)} | {_shown(row.slopes('cpu'))} | "
            f"{' '.join(f'{point.memory / MIB:.0f}' for point in points)} | {_shown(row.slopes('memory'))} | "
            f"{max(point.descriptors for point in points)} | {'straight' if row.is_straight else 'STEEPER'} |"
        )
    return "\n".join(lines)


def _shown(slopes: Sequence[float]) -> str:
    return " ".join(f"{slope:.2f}" for slope in slopes) or "–"


def picture(rows: Sequence[Row], path: Path) -> None:
    """Draw CPU time and memory of the rows of one axis, beside a straight line, as SVG."""
    import matplotlib as mpl  # noqa: PLC0415 - of an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context({"svg.fonttype": "none", "font.size": 10, "svg.hashsalt": "bench_scale"}):
        figure = Figure(figsize=(9.0, 3.6), layout="constrained", facecolor="white")
        for axes, (measure, title) in zip(figure.subplots(1, 2), _TITLES.items(), strict=True):
            scale = MIB if measure == "memory" else 1
            for row in rows:
                values = [max(getattr(point, measure), 1) / scale if scale > 1 else point.cpu for point in row.points]
                axes.plot([point.x for point in row.points], values, marker="o", markersize=3, label=row.work)
            ends = (min(row.points[0].x for row in rows), max(row.points[-1].x for row in rows))
            low = max(getattr(row.points[0], measure) for row in rows) / scale
            axes.plot(ends, [low, low * ends[1] / ends[0]], linestyle=":", color="#7b8794", label="straight line")
            axes.set(xscale="log", yscale="log", xlabel=rows[0].axis, title=title)
            axes.grid(visible=True, color="#e4e7eb")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize=8)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


_TITLES = {"cpu": "CPU time, s", "memory": "peak of memory, MiB"}


def write_document(document: Path, rows: Sequence[Row]) -> None:
    """Put table and pictures between the two marks of `document`."""
    axes = list(dict.fromkeys(row.axis for row in rows))
    parts = []
    for axis in axes:
        chosen = [row for row in rows if row.axis == axis]
        name = f"{document.stem}-{axis.lower()}.svg"
        picture(chosen, document.with_name(name))
        parts.append(f"![Cost by {axis}]({name})")
    before, _, rest = document.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    measured_part = "\n\n".join((_BEGIN, table(rows), *parts, _END))
    document.write_text(before + measured_part + after, encoding="utf-8")


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a JSON file of this script, none when there is no file."""
    if not path.exists():
        return []
    return [
        Row(axis=row["axis"], work=row["work"], points=tuple(Point(**point) for point in row["points"]))
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]
    ]


def merged(known: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Return all rows in the order of `SERIES`; a new one replaces its older self."""
    by_key = {(row.axis, row.work): row for row in (*known, *new)}
    return [by_key[series.axis, series.work] for series in SERIES if (series.axis, series.work) in by_key]


def main() -> int:
    """Run the command line; the exit code is 3 when something grows faster than a straight line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="rows whose 'axis: work' contains it")
    parser.add_argument("--up-to", type=int, metavar="N", help="leave larger sizes out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keep checkpoints here")
    parser.add_argument("--prepare", action="store_true", help="only make the checkpoints")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the rows to those of this file")
    parser.add_argument("--document", type=Path, metavar="FILE", help="write the table and pictures of --json into it")
    parser.add_argument("--only-document", action="store_true", help="measure nothing: write the document of --json")
    arguments = parser.parse_args()
    chosen = [series for series in SERIES if arguments.only in f"{series.axis}: {series.work}"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        rows = []
        for series in chosen if not arguments.only_document else ():
            xs = [x for x in series.xs if arguments.up_to is None or x <= arguments.up_to]
            if arguments.prepare:
                for x in xs:
                    series.prepare(folder, x)
                continue
            points = tuple(median_point(series, folder, x, arguments.rounds) for x in xs)
            rows.append(Row(axis=series.axis, work=series.work, points=points))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            if arguments.json is not None:
                known = [asdict(row) for row in merged(read_rows(arguments.json), rows)]
                content = json.dumps({"machine": machine(), "rows": known}, indent=1)
                arguments.json.write_text(content + "\n", encoding="utf-8")
    if arguments.json is not None:
        rows = merged(read_rows(arguments.json), rows)
    if arguments.document is not None:
        write_document(arguments.document, rows)
    return 0 if all(row.is_straight for row in rows) else 3


if __name__ == "__main__":
    sys.exit(main())
