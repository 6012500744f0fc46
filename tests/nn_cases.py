"""What the tests of shardfuse.nn have in common, on threads and on processes: each case runs on every rank of a mesh.

A case makes unsharded tensors, hands this rank its pieces, and compares every element of every result and gradient with
torch's in float64 on the unsharded tensors, by the rule of ``benchmarks.roundings``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional
from torch_answers import Expected
from torch_answers import compare as check_near
from torch_gradients import Rounded, leaf, with_gradients

from benchmarks.roundings import accumulator
from shardfuse import DeviceMesh
from shardfuse.nn import AddRMSNorm, CrossEntropyLoss, RMSNorm, SwiGLU, redistribute

Placements = Sequence[Placement]
Function = Callable[..., tuple[Tensor, ...]]
EPS = 1e-6
R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)


@dataclass(frozen=True)
class Here:
    """Where a case runs: this rank's mesh, and the device of its tensors."""

    mesh: DeviceMesh
    device: torch.device

    def sample(
        self, placements: Placements, shape: Sequence[int], dtype: torch.dtype, seed: int, scale: float = 1.0
    ) -> Sample:
        """Normal values; a partial sum's summands are normal too, and rounded to ``dtype`` each."""
        coordinate = self.mesh.coordinate(dist.get_rank() if dist.is_initialized() else 0)
        assert coordinate is not None
        generator = torch.Generator().manual_seed(seed)
        teams = [n if p.is_partial() else 1 for n, p in zip(self.mesh.shape, placements, strict=True)]
        summands = scale * torch.randn(*teams, *shape, dtype=torch.float64, generator=generator)
        summands = summands.to(self.device, dtype)
        mine = summands[tuple(c if p.is_partial() else 0 for c, p in zip(coordinate, placements, strict=True))]
        full = summands.double().sum(dim=list(range(len(teams))))
        size = summands.double().square().sum(dim=list(range(len(teams)))).sqrt()
        return Sample(full, self.cut(mine, placements).clone(), self, placements, size)

    def cut(self, full: Tensor, placements: Placements) -> Tensor:
        """This rank's piece of an unsharded tensor."""
        for parallel_type, placement in zip(self.mesh.parallel_types, placements, strict=True):
            if isinstance(placement, Shard):
                full = self.mesh.shard_tensor(full, placement.dim, parallel_type=parallel_type)
        return full


@dataclass
class Sample:
    """A tensor unsharded in float64, and this rank's piece of it (or summand) in the dtype of the case."""

    full: Tensor
    local: Tensor
    here: Here
    placements: Placements
    size: Tensor
    """How large its summands are, unsharded."""

    @property
    def rounded(self) -> Rounded:
        """By what a sum over it may move: partial sums are rounded to their own type, others are added up wide."""
        is_partial = any(p.is_partial() for p in self.placements)
        return self.local.dtype if is_partial else accumulator(self.local.dtype), self.size

    def expect(self, got: Tensor | None, expected: Expected, what: str) -> None:
        """``got`` lives as this tensor (or its gradient) does, and is this rank's piece of what torch gives."""
        assert got is not None, f"{what} is missing"
        got = got.to_local() if isinstance(got, DTensor) else got
        placements = whole(self.placements)
        check_near(what, got.detach(), expected, lambda x: self.here.cut(x, placements))
        if all(p.is_replicate() for p in placements):
            assert_same_on_all_ranks(got, what)


def whole(placements: Placements) -> Placements:
    """Where the gradient of a tensor lives."""
    return [R if p.is_partial() else p for p in placements]


def along(placements: Placements, dim: int) -> Placements:
    """The placement of a vector along ``dim`` of a tensor."""
    return [S0 if isinstance(p, Shard) and p.dim == dim else R for p in placements]


def named(placements: Placements, last: int) -> Placements:
    """The last dim by the name under which modules know it, Shard(-1)."""
    return [Shard(-1) if isinstance(p, Shard) and p.dim == last else p for p in placements]


def assert_same_on_all_ranks(tensor: Tensor, what: str) -> None:
    """Replicas are bitwise equal."""
    if dist.is_initialized():
        everyone: list[Tensor] = [tensor] * dist.get_world_size()
        dist.all_gather_object(everyone, tensor.detach().cpu())
        for rank, other in enumerate(everyone):
            assert torch.equal(other, everyone[0]), f"{what} of rank {rank} differs from rank 0's"


def compare(
    function: Function,
    inputs: dict[str, Sample],
    gradients: Sequence[Sample],
    results: dict[str, tuple[Tensor, Sample]],
    found: Sequence[Tensor | None],
    dtype: torch.dtype,
) -> None:
    """Results (each with a sample that lives where it does) and gradients, against torch's on unsharded tensors."""
    given, upstream = list(inputs.values()), list(gradients)
    rounded = [t.rounded for t in (*given, *upstream)]
    expected = with_gradients(function, [t.full for t in given], [t.full for t in upstream], dtype, rounded)
    for (what, (got, lives_as)), want in zip(results.items(), expected[: len(results)], strict=True):
        lives_as.expect(got, want, what)
    for (name, given), got, want in zip(inputs.items(), found, expected[len(results) :], strict=True):
        given.expect(got, want, f"gradient of {name}")


# --- norms -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norm:
    """One use of RMSNorm, or with a residual of AddRMSNorm."""

    x: Placements
    residual: Placements | None
    output: Placements
    output_grad: Placements
    shape: tuple[int, ...] = (2, 8, 16)

    @property
    def at(self) -> Placements:
        """Where the norm is computed."""
        if self.residual is not None:
            return self.residual
        return self.output if any(p.is_partial() for p in self.x) else self.x


def rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (functional.rms_norm(x, weight.shape, weight, EPS),)


def add_rms_norm(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    total = residual + (x + bias)
    return functional.rms_norm(total, weight.shape, weight, EPS), total


def check_norm(here: Here, case: Norm, dtype: torch.dtype) -> None:
    hidden, last = case.shape[-1], len(case.shape) - 1
    parameter = along(case.at, last)
    inputs = {
        "x": here.sample(case.x, case.shape, dtype, 1),
        "weight": here.sample(parameter, [hidden], dtype, 2),
    }
    gradients = [here.sample(case.output_grad, case.shape, dtype, 3)]
    where = {
        "mesh": here.mesh,
        "input": named(case.x, last),
        "output": named(case.output, last),
        "output_grad": case.output_grad,
        "device": here.device,
        "dtype": dtype,
    }
    output = replace(gradients[0], placements=case.output)
    if case.residual is None:
        module: RMSNorm | AddRMSNorm = RMSNorm(hidden, EPS, **where)
    else:
        inputs["input_bias"] = here.sample(parameter, [hidden], dtype, 4)
        inputs["residual"] = here.sample(case.residual, case.shape, dtype, 5)
        gradients.append(here.sample(case.residual, case.shape, dtype, 6))
        module = AddRMSNorm(hidden, EPS, bias=True, residual=named(case.residual, last), **where)
    module.load_state_dict({name: inputs[name].full.to(dtype) for name in module.state_dict()})
    x = leaf(inputs["x"].local)
    if case.residual is None:
        results = {"normed": (module(x), output)}
        found = [x, module.weight]
    else:
        residual = leaf(inputs["residual"].local)
        normed, total = module(x, residual)
        results = {"normed": (normed, output), "new residual": (total, gradients[1])}
        found = [x, module.weight, module.input_bias, residual]
    torch.autograd.backward([got for got, _ in results.values()], [g.local for g in gradients])
    function = rms_norm if case.residual is None else add_rms_norm
    compare(function, inputs, gradients, results, [t.grad for t in found], dtype)


NORMS_1D = {
    "rms_rows": Norm([S1], None, [S1], [S1]),
    "rms_gather": Norm([S1], None, [R], [P]),
    "rms_gather_replicated_gradient": Norm([S0], None, [R], [R], (4, 3, 16)),
    "rms_replicated": Norm([R], None, [R], [R]),
    "rms_hidden": Norm([S2], None, [S2], [S2]),
    "rms_hidden_gather": Norm([S2], None, [R], [P]),
    "rms_partial_scatter": Norm([P], None, [S1], [S1]),
    "rms_partial": Norm([P], None, [R], [R]),
    "rms_many_rows": Norm([S0], None, [S0], [S0], (64, 160)),
    "add_sequence_parallel": Norm([P], [S1], [R], [P]),
    "add_uneven_sequence": Norm([P], [S1], [R], [P], (2, 7, 16)),
    "add_rows": Norm([S1], [S1], [S1], [S1]),
    "add_slice": Norm([R], [S1], [R], [R]),
    "add_batch_to_sequence": Norm([S0], [S1], [S1], [S1], (4, 8, 16)),
    "add_hidden": Norm([P], [S2], [S2], [S2]),
    "add_hidden_gather": Norm([P], [S2], [R], [P], (3, 2, 32)),
    "add_replicated": Norm([P], [R], [R], [R]),
}
NORMS_2D = {
    "rms": Norm([S0, S1], None, [S0, R], [S0, P], (4, 4, 16)),
    "add": Norm([S0, P], [S0, S1], [S0, R], [S0, P], (4, 4, 16)),
    "add_hidden": Norm([S0, P], [S0, S2], [S0, S2], [S0, S2], (4, 4, 16)),
    "add_both_rows": Norm([S1, S1], [S1, S1], [S1, S1], [S1, S1], (2, 8, 16)),
}

# --- SwiGLU ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gate:
    """One use of SwiGLU."""

    placements: Placements
    shape: tuple[int, ...]


def swiglu(gate: Tensor, up: Tensor, gate_bias: Tensor, up_bias: Tensor) -> tuple[Tensor, ...]:
    return (functional.silu(gate + gate_bias) * (up + up_bias),)


def check_swiglu(here: Here, case: Gate, dtype: torch.dtype) -> None:
    features, last = case.shape[-1], len(case.shape) - 1
    bias, where = along(case.placements, last), named(case.placements, last)
    inputs = {
        "gate": here.sample(case.placements, case.shape, dtype, 1),
        "up": here.sample(case.placements, case.shape, dtype, 2),
        "gate_bias": here.sample(bias, [features], dtype, 3),
        "up_bias": here.sample(bias, [features], dtype, 4),
    }
    gradient = here.sample(case.placements, case.shape, dtype, 5)
    module = SwiGLU(features, bias=True, mesh=here.mesh, input=where, device=here.device, dtype=dtype)
    module.load_state_dict({name: inputs[name].full.to(dtype) for name in module.state_dict()})
    gate, up = leaf(inputs["gate"].local), leaf(inputs["up"].local)
    result = module(gate, up)
    result.backward(gradient.local)
    found = [t.grad for t in (gate, up, module.gate_bias, module.up_bias)]
    compare(swiglu, inputs, [gradient], {"result": (result, gradient)}, found, dtype)


SWIGLUS_1D = {
    "columns": Gate([S2], (2, 5, 16)),
    "uneven_columns": Gate([S2], (2, 5, 10)),
    "rows": Gate([S0], (4, 5, 16)),
    "replicated": Gate([R], (2, 5, 16)),
}
SWIGLUS_2D = {"rows_and_columns": Gate([S0, S2], (4, 3, 16))}

# --- cross entropy -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """One use of CrossEntropyLoss.  ``ignored``: how many targets are; ``scale``: standard deviation of the logits."""

    logits: Placements
    shape: tuple[int, ...] = (4, 8, 12)
    reduction: str = "mean"
    ignored: int = 3
    label_smoothing: float = 0.0
    scale: float = 1.0


def check_loss(here: Here, case: Loss, dtype: torch.dtype) -> None:
    classes, last = case.shape[-1], len(case.shape) - 1
    by_row = case.reduction == "none"
    rows = [R if isinstance(p, Shard) and p.dim == last else p for p in case.logits]
    logits = here.sample(case.logits, case.shape, dtype, 1, case.scale)
    target = torch.randint(classes, case.shape[:-1], generator=torch.Generator().manual_seed(2)).to(here.device)
    target.view(-1)[: case.ignored] = -100
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    at, shape = (rows, case.shape[:-1]) if by_row else ([R] * here.mesh.ndim, ())
    gradient = here.sample(at, shape, statistics, 3)
    options = {"reduction": case.reduction, "label_smoothing": case.label_smoothing}
    module = CrossEntropyLoss(mesh=here.mesh, logits=named(case.logits, last), num_classes=classes, **options)
    given = leaf(logits.local)
    result = module(given, here.cut(target, rows))
    result.backward(gradient.local)

    def cross_entropy(x: Tensor) -> tuple[Tensor, ...]:
        x = x.to(torch.promote_types(x.dtype, torch.float32)).flatten(0, -2)
        loss = functional.cross_entropy(x, target.flatten(), **options)
        return (loss.view(target.shape) if by_row else loss,)

    compare(cross_entropy, {"logits": logits}, [gradient], {"loss": (result, gradient)}, [given.grad], dtype)


LOSSES_1D = {
    "classes": Loss([S2]),
    "classes_uneven": Loss([S2], (2, 3, 10)),
    "classes_sum": Loss([S2], reduction="sum"),
    "classes_none": Loss([S2], reduction="none"),
    "classes_smoothed": Loss([S2], label_smoothing=0.1),
    "classes_large_logits": Loss([S2], scale=50.0),
    "rows": Loss([S0]),
    "rows_sequence": Loss([S1], label_smoothing=0.1),
    "rows_none": Loss([S1], reduction="none"),
    "rows_sum": Loss([S0], (16, 33), reduction="sum"),
    "replicated": Loss([R]),
    "wide": Loss([S1], (8, 512)),
}
LOSSES_2D = {"rows_and_classes": Loss([S0, S2]), "both_rows": Loss([S0, S1], (2, 8, 12))}

# --- redistribute ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """One use of redistribute; ``grad`` None is as the target."""

    source: Placements
    target: Placements
    grad: Placements | None = None


def check_redistribute(here: Here, case: Move, dtype: torch.dtype) -> None:
    shape = (8, 4, 3)
    x = here.sample(case.source, shape, dtype, 1)
    gradient = here.sample(case.grad or case.target, shape, dtype, 2)
    given = leaf(x.local)
    result = redistribute(given, here.mesh, case.source, case.target, grad=case.grad)
    result.backward(gradient.local)
    target = replace(x, placements=case.target)
    compare(lambda t: (t.clone(),), {"x": x}, [gradient], {"result": (result, target)}, [given.grad], dtype)


MOVES_1D = {
    "slice": Move([R], [S1]),
    "gather": Move([S1], [R], [P]),
    "gather_replicated_gradient": Move([S0], [R]),
    "reduce": Move([P], [R]),
    "reduce_scatter": Move([P], [S1]),
    "all_to_all": Move([S0], [S1]),
}
MOVES_2D = {"gather_inner": Move([S0, S1], [S0, R], [S0, P]), "slice_both": Move([R, R], [S0, S1])}

# --- all of them -------------------------------------------------------------------------------------------

Check = Callable[[Here], None]

_KINDS = {
    "norm": (check_norm, NORMS_1D, NORMS_2D),
    "swiglu": (check_swiglu, SWIGLUS_1D, SWIGLUS_2D),
    "loss": (check_loss, LOSSES_1D, LOSSES_2D),
    "redistribute": (check_redistribute, MOVES_1D, MOVES_2D),
}
_IN_EVERY_DTYPE = {
    "norm": ("add_sequence_parallel", "rms_hidden", "rms_many_rows"),
    "swiglu": ("columns",),
    "loss": ("classes", "classes_large_logits", "wide"),
    "redistribute": ("gather", "reduce_scatter"),
}

ON_LINE: dict[str, Check] = {}
"""Cases for a 1-D mesh, by name: all in float64, some in the other dtypes too."""
ON_SQUARE: dict[str, Check] = {}
"""Cases for a 2-D mesh of 2 by 2, by name, in float64."""

for _kind, (_check, _line, _square) in _KINDS.items():
    for _name, _case in _line.items():
        ON_LINE[f"{_kind}_{_name}"] = partial(_check, case=_case, dtype=torch.float64)
    for _name, _case in _square.items():
        ON_SQUARE[f"{_kind}_{_name}"] = partial(_check, case=_case, dtype=torch.float64)
    for _dtype in (torch.float32, torch.bfloat16, torch.float16):
        for _name in _IN_EVERY_DTYPE[_kind]:
            _label = f"{_kind}_{_name}_{str(_dtype).removeprefix('torch.')}"
            ON_LINE[_label] = partial(_check, case=_line[_name], dtype=_dtype)
