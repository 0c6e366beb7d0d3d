"""Validation of plans: a model without weights runs as one rank, and its values are compared with the whole model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bigload.parallel.tensor_parallel.example_inputs import tensors_in
from bigload.parallel.tensor_parallel.partial_plan import PartialPlan, cut, sliced
from bigload.parallel.tensor_parallel.plan import LocalArgument
from bigload.parallel.tensor_parallel.weightless_model import WeightlessModel, hollow, is_hollow, replaced
from bigload.planning.tensor_parallel.division import WHOLE, Division

Call = tuple[str, int]
"""The name of a layer, and how often it had been called before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRun:
    """A forward of the undivided model.

    Attributes:
        example: Its arguments.
        inputs: What each layer got, in the order of calls.
        answers: The noise that each made of it, a leaf of the graph.
        summed: What modules made whose outputs ranks sum, by their names.
        outputs: The tensors that came out.
    """

    example: Mapping[str, object]
    inputs: Mapping[Call, Tensor]
    answers: Mapping[Call, Tensor]
    summed: Mapping[str, Sequence[Tensor]]
    outputs: Sequence[Tensor]


class MismatchError(Exception):
    """A rank would meet other values than it should; the text says where."""


def run_reference(
    weightless: WeightlessModel, example: Mapping[str, object], summed: Sequence[str] = ()
) -> ReferenceRun:
    """Return what happens in a forward with the arguments `example`; of the modules in `summed`, what they make."""
    inputs: dict[Call, Tensor] = {}
    answers: dict[Call, Tensor] = {}
    made: dict[str, list[Tensor]] = {name: [] for name in summed}

    def on_call(name: str, number: int, given: Tensor, noise: Callable[[], Tensor]) -> Tensor:
        inputs[name, number] = given.clone()  # models write into what they have been given
        answers[name, number] = noise().requires_grad_()
        return answers[name, number].clone()

    def keep(name: str) -> Callable[..., None]:
        return lambda _module, _inputs, output: made[name].append(output)

    with ExitStack() as stack, torch.enable_grad():
        for name in summed:
            stack.enter_context(_hooked(weightless.module.get_submodule(name).register_forward_hook(keep(name))))
        output = weightless.run(example, on_call)
    return ReferenceRun(example=example, inputs=inputs, answers=answers, summed=made, outputs=tensors_in(output))


class _DoneError(Exception):
    """All has been seen that was to be seen."""


def run_as_rank(
    weightless: WeightlessModel,
    reference: ReferenceRun,
    plan: PartialPlan,
    *,
    rank: int,
    size: int,
    until: str | None = None,
) -> None:
    """Run the model as `rank` of `size`, and let layers that sum or gather answer as if the others were there.

    It ends when the layer `until` has got what it should, or with the forward.

    Raises:
        MismatchError: a layer gets, or the model returns, something else than its part of what it should be.
        Exception: whatever the model raises, which cannot work with what this rank has.
    """
    rank_run = _RankRun(weightless, reference, plan, rank=rank, until=until)
    parameters = {
        name: rank_run.local_parameter(name, division) for name, division in plan.divisions.items() if division != WHOLE
    }
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(replaced(weightless.module, parameters, plan.attributes))
        for name, arguments in plan.arguments.items():
            stack.enter_context(cutting(weightless.module.get_submodule(name), arguments, rank, size))
        for name in reference.summed:
            stack.enter_context(rank_run.summing(name))
        try:
            outputs = tensors_in(weightless.run(reference.example, rank_run.on_call))
        except _DoneError:
            return
    if len(outputs) != len(reference.outputs):
        raise MismatchError(f"{len(outputs)} tensors come out, expected {len(reference.outputs)}")
    for number, (found, expected) in enumerate(zip(outputs, reference.outputs, strict=True)):
        _check(f"output {number}", found, expected)


def misfit(
    weightless: WeightlessModel, reference: ReferenceRun, plan: PartialPlan, size: int, until: str | None = None
) -> str | None:
    """Return what is wrong with `plan` for the first or the last of `size` ranks, `None` if nothing is."""
    for rank in (0, size - 1):
        try:
            run_as_rank(weightless, reference, plan, rank=rank, size=size, until=until)
        except Exception as error:  # of the model's own code, which meets shapes that it may not be made for
            return f"{error}" if isinstance(error, MismatchError) else f"{type(error).__name__}: {error}"
    return None


class _RankRun:
    """Outputs and parameters of layers in a run as one rank."""

    def __init__(
        self, weightless: WeightlessModel, reference: ReferenceRun, plan: PartialPlan, *, rank: int, until: str | None
    ) -> None:
        self._weightless, self._reference, self._plan = weightless, reference, plan
        self._rank, self._until = rank, until

    def local_parameter(self, name: str, division: Division) -> Tensor:
        path, _, last = name.rpartition(".")
        whole = self._weightless.module.get_submodule(path)._parameters[last]
        assert whole is not None
        if path in self._weightless.layers or is_hollow(whole):
            return hollow(division.shape(tuple(whole.shape), self._rank))
        return nn.Parameter(sliced(whole.detach(), division, self._rank), requires_grad=False)

    def on_call(self, name: str, number: int, given: Tensor, noise: object, /) -> Tensor:  # noqa: ARG002
        if (name, number) not in self._reference.inputs:
            raise MismatchError(f"{name} is called more often")
        expected = self._reference.inputs[name, number].detach()
        answer = self._reference.answers[name, number].detach()
        style = self._plan.styles.get(name)
        division = self._plan.divisions.get(f"{name}.weight", WHOLE)
        if style == "rowwise":
            expected = sliced(expected, Division(-1, division.ranges), self._rank)
        _check(name, given, expected)
        if name == self._until and (name, number + 1) not in self._reference.inputs:
            raise _DoneError
        if style in ("colwise", "local_params"):
            answer = sliced(answer, Division(-1, division.ranges), self._rank)
        return answer.clone()

    @contextmanager
    def summing(self, name: str) -> Iterator[None]:
        """Let the module `name` return the sum over all ranks; what it makes by itself has to have the sum's form."""
        sums = iter(self._reference.summed[name])

        def swap(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
            whole = next(sums).detach()
            if output.shape != whole.shape:
                raise MismatchError(f"{name} makes {tuple(output.shape)}, expected {tuple(whole.shape)}")
            return whole

        with _hooked(self._weightless.module.get_submodule(name).register_forward_hook(swap)):
            yield


@contextmanager
def cutting(module: nn.Module, arguments: Sequence[LocalArgument], rank: int, size: int) -> Iterator[None]:
    """Let `module` see only what `rank` has of `arguments`, within the context."""
    with _hooked(cut_arguments(module, arguments, rank, size)):
        yield


def cut_arguments(module: nn.Module, arguments: Sequence[LocalArgument], rank: int, size: int) -> RemovableHandle:
    """Let `module` see only what `rank` has of `arguments` from now on; return the handle that ends it."""
    parameters = signature(module.forward)

    def pre_forward(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        given = parameters.bind_partial(*args, **kwargs)
        for argument in arguments:
            value = given.arguments.get(argument.name)
            if isinstance(value, Tensor) and value.shape[argument.dim] % argument.count == 0:  # else one for all
                given.arguments[argument.name] = cut(value, argument, rank, size)
        return given.args, given.kwargs

    return module.register_forward_pre_hook(pre_forward, with_kwargs=True)


@contextmanager
def _hooked(handle: RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _check(what: str, found: Tensor, expected: Tensor) -> None:
    if found.shape != expected.shape:
        raise MismatchError(f"{what} has {tuple(found.shape)}, expected {tuple(expected.shape)}")
    if torch.equal(found, expected):
        return
    scale = float(expected.detach().abs().nan_to_num(0, 0, 0).max()) if expected.is_floating_point() else 0.0
    if not scale or not torch.allclose(found, expected, rtol=1e-3, atol=1e-5 * scale, equal_nan=True):
        raise MismatchError(f"{what} has other values")
