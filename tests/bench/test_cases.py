import pytest

from bigload.bench.cases import LoadCase, all_cases
from bigload.bench.loaded_memory import MemoryKind
from bigload.checkpoint.source import open_checkpoint
from bigload.loading.settings import Method
from builders import make_checkpoint


def test_every_method_is_tried_with_every_thread_count():
    assert [case.name for case in all_cases((1, 4), (Method.READ, Method.MMAP))] == [
        "read, 1 thread",
        "read, 4 threads",
        "mmap, 1 thread",
        "mmap, 4 threads",
    ]


def test_what_is_named_twice_is_one_case():
    assert len(all_cases((2, 1, 2), (Method.READ, Method.READ))) == 2


@pytest.mark.parametrize(
    ("threads", "methods"), [((), ("read",)), ((1,), ()), ((1, 0), ("read",)), ((-2,), ("read",)), ((1,), ("quick",))]
)
def test_no_case_and_no_such_case_are_refused(threads, methods):
    with pytest.raises(ValueError, match=r"at least one thread count|quick"):
        all_cases(threads, methods)


@pytest.mark.parametrize(
    ("case", "memory"),
    [
        (LoadCase(threads=1, method=Method.READ), MemoryKind.PRIVATE),
        (LoadCase(threads=1, method=Method.MMAP), MemoryKind.FILE),
        (LoadCase(threads=1, method=Method.MMAP, dtype="fp32"), MemoryKind.PRIVATE),
        (LoadCase(threads=1, method=Method.MMAP, device="cuda:0"), MemoryKind.DEVICE),
    ],
)
def test_a_case_knows_in_which_memory_it_ends(case, memory):
    assert case.memory is memory


@pytest.mark.parametrize("method", [Method.READ, Method.MMAP])
def test_a_case_is_loaded_the_way_it_says(tmp_path, method):
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "tiny"))
    case = LoadCase(threads=2, method=method, max_inflight=1 << 21)
    tensors = case.load(checkpoint, only=["model.norm.weight"], trace=True)
    assert list(tensors) == ["model.norm.weight"]
    assert (tensors.report.method, tensors.report.threads) == (method, 2)
    assert tensors.report.max_inflight_bytes == 1 << 21
    assert tensors.report.activities
