"""Validation of plans: a model without weights runs as one rank, and its values are compared with the whole model's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bigload.parallel.tensor_parallel.example_inputs import tensors_in
from bigload.parallel.tensor_parallel.forwards import cut_arguments, route_to_own
from bigload.parallel.tensor_parallel.plan import PartialPlan, sliced
from bigload.parallel.tensor_parallel.weightless_model import WeightlessModel, hollow, is_hollow, replaced
from bigload.planning.tensor_parallel.division import WHOLE, Division

Call = tuple[str, int]
"""The name of a layer, and how often it had been called before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRun:
    """A forward of the undivided model: the `inputs` that each layer got, in the order of calls.

    `answers` are the noise that each made of them, leaves of the graph; `summed` is what modules made whose outputs
    ranks sum, by their names.
    """

    weightless: WeightlessModel
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
            stack.enter_context(weightless.module.get_submodule(name).register_forward_hook(keep(name)))
        output = weightless.run(example, on_call)
    return ReferenceRun(
        weightless=weightless,
        example=example,
        inputs=inputs,
        answers=answers,
        summed=made,
        outputs=tensors_in(output),
    )


class _DoneError(Exception):
    """All has been seen that was to be seen."""


def misfit(reference: ReferenceRun, plan: PartialPlan, size: int, until: str | None = None) -> str | None:
    """Return what is wrong with `plan` for the first or the last of `size` ranks, `None` if nothing is.

    Forwards end when the layer `until` has got what it should.
    """
    for rank in (0, size - 1):
        try:
            _RankRun(reference=reference, plan=plan, rank=rank, size=size, until=until).run()
        except Exception as error:  # of the model's own code, which meets shapes that it may not be made for
            return f"{error}" if isinstance(error, MismatchError) else f"{type(error).__name__}: {error}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankRun:
    """A forward as `rank` of `size`, in which layers that sum or gather answer as if the other ranks were there."""

    reference: ReferenceRun
    plan: PartialPlan
    rank: int
    size: int
    until: str | None

    def run(self) -> None:
        """Run the model.

        Raises:
            MismatchError: a layer gets, or the model returns, something else than its part of what it should be.
            Exception: whatever the model raises, which cannot work with what this rank has.
        """
        module, plan = self.reference.weightless.module, self.plan
        parameters = {
            name: self._local_parameter(name, division)
            for name, division in plan.divisions.items()
            if division != WHOLE
        }
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(replaced(module, parameters, plan.attributes))
            for name, arguments in plan.arguments.items():
                stack.enter_context(cut_arguments(module.get_submodule(name), arguments, self.rank, self.size))
            for name in (name for name, style in plan.styles.items() if style == "moe_ep_experts"):
                stack.enter_context(route_to_own(module.get_submodule(name), self.rank))
            for name in self.reference.summed:
                stack.enter_context(self._summing(name))
            try:
                outputs = tensors_in(self.reference.weightless.run(self.reference.example, self._on_call))
            except _DoneError:
                return
        if len(outputs) != len(self.reference.outputs):
            raise MismatchError(f"{len(outputs)} tensors come out, expected {len(self.reference.outputs)}")
        for number, (found, expected) in enumerate(zip(outputs, self.reference.outputs, strict=True)):
            _check(f"output {number}", found, expected)

    def _local_parameter(self, name: str, division: Division) -> Tensor:
        path, _, last = name.rpartition(".")
        weightless = self.reference.weightless
        whole = weightless.module.get_submodule(path)._parameters[last]
        assert whole is not None
        if path in weightless.layers or is_hollow(whole):
            return hollow(division.shape(tuple(whole.shape), self.rank))
        return nn.Parameter(sliced(whole.detach(), division, self.rank), requires_grad=False)

    def _on_call(self, name: str, number: int, given: Tensor, noise: object) -> Tensor:  # noqa: ARG002
        inputs = self.reference.inputs
        if (name, number) not in inputs:
            raise MismatchError(f"{name} is called more often")
        expected = inputs[name, number].detach()
        answer = self.reference.answers[name, number].detach()
        style = self.plan.styles.get(name)
        local = Division(-1, self.plan.divisions[f"{name}.weight"].ranges) if style in _LOCAL else WHOLE
        _check(name, given, sliced(expected, local, self.rank) if style == "rowwise" else expected)
        if name == self.until and (name, number + 1) not in inputs:
            raise _DoneError
        return (answer if style == "rowwise" else sliced(answer, local, self.rank)).clone()

    def _summing(self, name: str) -> RemovableHandle:
        """Let the module `name` return the sum over all ranks; what it makes by itself has to have the sum's form."""
        sums = iter(self.reference.summed[name])

        def swap(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
            whole = next(sums).detach()
            if output.shape != whole.shape:
                raise MismatchError(f"{name} makes {tuple(output.shape)}, expected {tuple(whole.shape)}")
            return whole

        return self.reference.weightless.module.get_submodule(name).register_forward_hook(swap)


_LOCAL = ("rowwise", "colwise", "local_params")
"""Forward styles of layers whose inputs or outputs are those of one rank."""


def _check(what: str, found: Tensor, expected: Tensor) -> None:
    if found.shape != expected.shape:
        raise MismatchError(f"{what} has {tuple(found.shape)}, expected {tuple(expected.shape)}")
    if torch.equal(found, expected):
        return
    scale = float(expected.detach().abs().nan_to_num(0, 0, 0).max()) if expected.is_floating_point() else 0.0
    if not scale or not torch.allclose(found, expected, rtol=1e-3, atol=1e-5 * scale, equal_nan=True):
        raise MismatchError(f"{what} has other values")
