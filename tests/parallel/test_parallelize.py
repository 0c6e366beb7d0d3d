"""A model in two workers answers as it does here, and is given back as it was."""

import copy
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from inspect import signature
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bigload
from bigload.errors import (
    CheckpointNotFoundError,
    ModelNotSendableError,
    OptionError,
    ParallelError,
    StateDictMismatchError,
    WorkerError,
)
from bigload.parallel.parallelize import _warn_of_too_many
from process_census import census, is_running, run_program, settled
from worker_models import Differing, TwoLayers, WithCaches

METHODS = ("forward", "twice", "noise", "speak", "unpicklable")
EXAMPLE = {"x": torch.ones(2, 8)}


def two_layers():
    torch.manual_seed(0)
    return TwoLayers().eval()


def state_of(model):
    """What a model is: its attributes, and those of its parts, by name; tensors by identity and value."""
    return {
        (name, attribute): value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if attribute not in ("_modules", "_parameters", "_buffers")
    }


@pytest.fixture(scope="module")
def spread():
    """A model in two workers, a copy of it here, and what its attributes were before."""
    model = two_layers()
    plain, before = copy.deepcopy(model), state_of(model)
    with torch.no_grad(), bigload.parallelize(model, 2, backend="gloo", methods=METHODS, example=EXAMPLE) as parallel:
        yield model, plain, parallel
    assert state_of(model) == before


def test_calls_of_the_model_give_what_it_gives_here(spread):
    model, plain, _ = spread
    x = torch.randn(3, 8)
    torch.testing.assert_close(model(x), plain(x))
    torch.testing.assert_close(model(x=x), plain(x))
    torch.testing.assert_close(model.twice(x), plain.twice(x))


def test_what_is_returned_keeps_its_form(spread):
    model, plain, _ = spread
    x, bias = torch.randn(3, 8), torch.randn(8)
    found, expected = model(x, bias=bias), plain(x, bias=bias)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found["sum"], expected["sum"])
    assert torch.equal(found["bias"], bias)


def test_each_worker_has_its_share_of_the_weights(spread):
    model, _, parallel = spread
    whole = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    divided = model.up.weight.nbytes + model.up.bias.nbytes + model.down.weight.nbytes
    assert [worker.weight_bytes for worker in parallel.report.workers] == [whole - divided // 2] * 2
    assert parallel.memory_allocated() == {"cpu:0": whole - divided // 2, "cpu:1": whole - divided // 2}


def test_memory_is_told_by_worker_under_all_names(spread):
    model, _, parallel = spread
    reserved = model.memory_reserved()
    assert reserved.keys() == {"cpu:0", "cpu:1"}
    assert all(2**20 < num_bytes < 2**32 for num_bytes in reserved.values())
    assert model.memory_cached().keys() == model.memory_chached().keys() == reserved.keys()
    assert model.memory_allocated() == parallel.memory_allocated()


def test_random_numbers_are_those_that_this_process_would_draw(spread):
    model, plain, _ = spread
    torch.manual_seed(5)
    expected = [plain.noise(3), plain.noise(2), torch.rand(1)]
    torch.manual_seed(5)
    found = [model.noise(3), model.noise(2), torch.rand(1)]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_threads_may_call_at_the_same_time(spread):
    model, plain, _ = spread
    inputs = [torch.full((1, 8), float(number)) for number in range(8)]
    found = [None] * len(inputs)

    def call(number):
        found[number] = model(inputs[number])

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x, y in zip(inputs, found, strict=True):
        torch.testing.assert_close(y, plain(x))


def test_what_the_model_raises_is_told_with_its_traceback_and_it_can_be_called_again(spread):
    model, plain, _ = spread
    with pytest.raises(WorkerError, match="worker 0 raised RuntimeError while running forward") as caught:
        model(torch.ones(3))
    assert "worker_models.py" in caught.value.worker_traceback
    assert caught.value.kind == "RuntimeError"
    with pytest.raises(WorkerError, match="TypeError"):
        model(torch.ones(8), nonsense=1)
    torch.testing.assert_close(model(torch.ones(8)), plain(torch.ones(8)))


def test_what_cannot_travel_is_told_here_or_there(spread):
    model, _, _ = spread
    with pytest.raises(ModelNotSendableError, match="an argument of forward: it cannot be pickled"):
        model(lambda: None)
    with pytest.raises(WorkerError, match="while running unpicklable"):
        model.unpicklable(1)
    assert model.noise(1).shape == (1,)


def test_hooks_of_the_model_run_here_once(spread):
    model, plain, _ = spread
    seen = []
    handle = model.register_forward_hook(lambda module, args, output: seen.append(output))
    model(torch.ones(8))
    handle.remove()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], plain(torch.ones(8)))


def test_what_workers_write_is_kept_for_those_who_ask(spread, capfd):
    model, _, parallel = spread
    model.speak("hello from a worker")
    assert ["hello from a worker" in log for log in parallel.logs()] == [True, True]
    assert capfd.readouterr().out == ""


def test_a_model_that_has_workers_is_not_given_others(spread):
    model, _, _ = spread
    with pytest.raises(OptionError, match='model is "TwoLayers"; expected one that has no workers'):
        bigload.parallelize(model, 2, backend="gloo")


def test_methods_keep_their_signature(spread):
    model, plain, _ = spread
    assert signature(model.forward) == signature(plain.forward)


def test_autocast_around_a_call_counts_in_the_workers(spread):
    model, plain, _ = spread
    x = torch.randn(3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = model(x), plain(x)
    assert (found - model(x)).abs().max() > 1e-4
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("make", [copy.deepcopy, pickle.dumps])
def test_a_model_that_has_workers_is_not_copied(spread, make):
    model, _, parallel = spread
    for each in (model, parallel, model.forward):
        with pytest.raises(ModelNotSendableError, match="neither copied nor pickled"):
            make(each)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model.safetensors"
    save_file(two_layers().state_dict(), path)
    return path


@pytest.mark.slow
def test_a_model_without_weights_runs_from_its_checkpoint_and_ends_without_a_trace(saved, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gc.collect()
    before, environment = census(), dict(os.environ)
    plain = two_layers()
    with bigload.init_empty_weights():
        model = TwoLayers()
    model.eval()
    attributes = state_of(model)
    parallel = bigload.parallelize(
        model, 2, backend="gloo", checkpoint=saved, methods=["forward", "noise"], example=EXAMPLE
    )
    assert all(parameter.is_meta for parameter in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(model(torch.ones(2, 8)), plain(torch.ones(2, 8)))
    whole = sum(tensor.nbytes for tensor in plain.state_dict().values())
    assert all(whole // 2 < worker.read_bytes < whole for worker in parallel.report.workers)
    process_ids = parallel.process_ids
    assert all(map(is_running, process_ids))
    model.deparallelize()
    assert not any(map(is_running, process_ids))
    assert state_of(model) == attributes
    assert all(parameter.is_meta for parameter in model.parameters())
    parallel.deparallelize()  # again, which does nothing
    with pytest.raises(WorkerError, match="asked to stop"):
        parallel.memory_allocated()
    del parallel
    gc.collect()
    assert settled(before) == before
    assert dict(os.environ) == environment


@pytest.mark.slow
def test_a_model_that_nobody_refers_to_takes_its_workers_along(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gc.collect()
    before = census()
    parallel = bigload.parallelize(two_layers(), 2, backend="gloo", example=EXAMPLE)
    process_ids = parallel.process_ids
    del parallel
    gc.collect()
    assert not any(map(is_running, process_ids))
    assert settled(before) == before


@pytest.mark.slow
def test_caches_stay_with_the_workers_and_can_be_given_back():
    model = WithCaches()
    with bigload.parallelize(model, 2, backend="gloo", example={"x": torch.ones(1)}):
        first = model(torch.tensor([1.0]))
        assert repr(first["cache"]) == "<cache of 1 positions, kept by workers>"
        second = model(torch.tensor([2.0]), cache=first["cache"])
        assert second["cache"] is first["cache"]
        assert second["sum"].item() == 3
        assert second["cache"].get_seq_length() == 2
        other = model(torch.tensor([5.0]))
        assert other["cache"] is not first["cache"]
        assert model(torch.tensor([3.0]), first["cache"])["sum"].item() == 6


@pytest.mark.slow
def test_workers_that_disagree_are_told():
    model = Differing()
    with (
        bigload.parallelize(model, 2, backend="gloo", example={}),
        pytest.raises(WorkerError, match="worker 1: int64"),
    ):
        model()


@pytest.mark.slow
def test_half_precision_is_for_the_workers_alone(saved):
    for checkpoint in (None, saved):
        model = two_layers()
        with bigload.parallelize(model, 2, True, backend="gloo", checkpoint=checkpoint, example=EXAMPLE) as parallel:
            found = model(torch.ones(8).half())
            assert parallel.report.workers[0].weight_bytes < sum(p.nbytes for p in model.parameters()) * 0.4
        assert found.dtype == torch.float32  # the buffer that is not stored stays as it is
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        torch.testing.assert_close(found, model(torch.ones(8)).detach(), rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_four_workers_and_one_give_what_the_model_gives(saved):
    plain = two_layers()
    for num_workers in (1, 4):
        model = two_layers()
        with bigload.parallelize(model, num_workers, backend="gloo", example=EXAMPLE), torch.no_grad():
            torch.testing.assert_close(model(torch.ones(8)), plain(torch.ones(8)))


@pytest.mark.slow
def test_what_is_told_goes_to_the_log(caplog):
    with caplog.at_level(logging.INFO, "bigload.parallel"):
        bigload.parallelize(two_layers(), 2, backend="gloo", verbose="detail", example=EXAMPLE).deparallelize()
    assert "worker 1, process" in caplog.text
    assert "up.weight: ((" in caplog.text


def test_a_bool_in_the_second_place_is_fp16_as_parallelformers_has_it():
    options = {"backend": "gloo", "example": EXAMPLE}
    for arguments, by_name in (((True, 5000), {}), ((5000, True), {}), ((True,), {"num_gpus": 5000})):
        with pytest.raises(OptionError, match="num_gpus is 5000; expected 1 to 1024"):
            bigload.parallelize(two_layers(), *arguments, **by_name, **options)
    with pytest.raises(OptionError, match="num_gpus is True"):
        bigload.parallelize(two_layers(), False, True, **options)


@pytest.mark.slow
def test_a_call_written_for_parallelformers_runs_and_moving_the_model_ends_it():
    model = two_layers()
    arguments = (True, 2, None, "127.0.0.1", 29500, "gloo", None, "spawn", True, 7)
    parallel = bigload.parallelize(model, *arguments, example=EXAMPLE)
    process_ids = parallel.process_ids
    assert torch.initial_seed() == 7
    whole = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert all(worker.weight_bytes < whole / 3 for worker in parallel.report.workers)  # a half, in half of the bytes
    assert set(model.memory_chached()) == {"cpu:0", "cpu:1"}
    assert model.cpu() is model
    assert not any(map(is_running, process_ids))
    with torch.no_grad():
        torch.testing.assert_close(model(torch.ones(8)), two_layers()(torch.ones(8)))


@pytest.mark.slow
def test_no_port_is_opened_here_and_workers_listen_to_this_host_alone():
    before = listening_addresses(os.getpid())
    address = {"master_addr": "203.0.113.7", "master_port": 1}  # parallelformers' arguments; nothing listens there
    model = two_layers()
    with bigload.parallelize(model, 2, backend="gloo", example=EXAMPLE, **address) as parallel, torch.no_grad():
        assert listening_addresses(os.getpid()) == before
        heard = [address for process_id in parallel.process_ids for address in listening_addresses(process_id)]
        assert heard, "gloo listens"
        assert all(address.startswith("0100007F:") for address in heard)  # 127.0.0.1
        torch.testing.assert_close(model(torch.ones(8)), two_layers()(torch.ones(8)))


def listening_addresses(process_id):
    """Return the TCP addresses at which a process listens, as proc_net_tcp(5) writes them."""
    open_files = {str(link.readlink()) for link in Path(f"/proc/{process_id}/fd").iterdir() if link.is_symlink()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return [line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in open_files]


OPTIONS = [
    ({"num_gpus": 0}, "num_gpus is 0; expected 1 to 1024"),
    ({"num_gpus": "2"}, 'num_gpus is "2"'),
    ({"backend": "mpi"}, 'backend is "mpi"; expected nccl or gloo'),
    ({"verbose": "loud"}, "expected none, simple or detail"),
    ({"init_method": "fork"}, 'init_method is "fork"; expected spawn'),
    ({"timeout": 0}, "timeout is 0; expected more than 0 seconds"),
    ({"start_timeout": -1.0}, "start_timeout is -1.0"),
    ({"timeout": "soon"}, 'timeout is "soon"; expected more than 0 seconds'),
    ({"start_timeout": True}, "start_timeout is True"),
    ({"model": 5}, "model is 5; expected a torch.nn.Module, or a folder"),
    ({"example": torch.ones(1)}, "expected arguments of a forward by name"),
    ({"example": {1: 2}}, "expected arguments of a forward by name"),
    ({"methods": ["sing"]}, 'methods is "sing"; expected a method of TwoLayers'),
    ({"master_port": 70000}, "master_port is 70000"),
]


@pytest.mark.parametrize(("options", "text"), OPTIONS, ids=[next(iter(options)) for options, _ in OPTIONS])
def test_an_argument_that_cannot_be_is_refused_before_anything_starts(options, text):
    before = census()
    with pytest.raises(OptionError, match=text):
        bigload.parallelize(**{"model": two_layers(), "num_gpus": 2, "backend": "gloo", "example": EXAMPLE, **options})
    assert census().children == before.children


def test_more_workers_than_cores_are_told(monkeypatch, caplog):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    _warn_of_too_many(3, "gloo")
    assert caplog.messages == [
        "3 workers take turns on 2 cores: more than one for each core makes starts and calls slower"
    ]
    _warn_of_too_many(2, "gloo")
    _warn_of_too_many(3, "nccl")
    assert len(caplog.messages) == 1


def test_a_process_that_imports_the_script_again_is_told_to_have_a_guard(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(ParallelError, match="imports the script again") as caught:
        bigload.parallelize(two_layers(), 2, backend="gloo", example=EXAMPLE)
    assert '__name__ == "__main__"' in caught.value.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are accelerators")
def test_without_accelerators_the_error_says_what_to_pass():
    with pytest.raises(OptionError, match='backend="gloo" runs the workers on the CPU'):
        bigload.parallelize(two_layers(), 2)


@pytest.mark.slow
def test_a_model_without_weights_needs_a_checkpoint_that_has_them(saved, tmp_path):
    with bigload.init_empty_weights():
        model = TwoLayers()
    with pytest.raises(OptionError, match=r"up\.weight is on the meta device, and 3 more are"):
        bigload.parallelize(model, 2, backend="gloo", example=EXAMPLE)
    with pytest.raises(CheckpointNotFoundError):
        bigload.parallelize(model, 2, backend="gloo", checkpoint=tmp_path, example=EXAMPLE)
    save_file({"up.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(StateDictMismatchError, match="3 missing, 0 unexpected, 1 of another shape"):
        bigload.parallelize(model, 2, backend="gloo", checkpoint=tmp_path, example=EXAMPLE)
    with bigload.init_empty_weights(include_buffers=True):
        model = TwoLayers()
    with pytest.raises(OptionError, match="shift is on the meta device"):
        bigload.parallelize(model, 2, backend="gloo", checkpoint=saved, example=EXAMPLE)


SCRIPT = """
import torch, bigload
from torch import nn
model = nn.Sequential(nn.Linear(4, 4))
with bigload.parallelize(model, 2, backend="gloo", example={"input": torch.ones(1, 4)}):
    print(model(torch.ones(4)).shape)
"""


@pytest.mark.slow
def test_a_script_needs_no_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = run_program(script)
    assert run.stdout == "torch.Size([4])\n", run.stderr


def test_a_class_of_the_script_itself_is_told_with_what_to_do():
    class Net(nn.Linear):
        pass

    Net.__module__, Net.__qualname__ = "__main__", "Net"
    with pytest.raises(ModelNotSendableError, match="Net is defined in the script or notebook") as caught:
        bigload.parallelize(nn.Sequential(Net(4, 4)), 2, backend="gloo", example={"input": torch.ones(1, 4)})
    assert "from net import Net" in caught.value.hint
    Net.__qualname__ = "main.<locals>.Net"
    with pytest.raises(ModelNotSendableError) as caught:
        bigload.parallelize(nn.Sequential(Net(4, 4)), 2, backend="gloo", example={"input": torch.ones(1, 4)})
    assert "not inside of a function" in caught.value.hint
    assert "from net import" not in caught.value.hint


def test_a_worker_that_is_killed_is_told_by_the_next_call_and_the_others_are_ended(spread):
    """The last test here that uses the workers; `test_worker_failures.py` has deaths at other moments."""
    model, _, parallel = spread
    process_ids = parallel.process_ids
    os.kill(process_ids[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match="worker 1 ended with SIGKILL") as caught:
        model(torch.ones(2, 8))
    assert (caught.value.rank, caught.value.exit_code) == (1, -signal.SIGKILL)
    assert not any(map(is_running, process_ids))
    with pytest.raises(WorkerError, match="worker 1 ended with SIGKILL"):
        model(torch.ones(2, 8))
