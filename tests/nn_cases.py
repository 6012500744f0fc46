"""What the tests of shardfuse.nn have in common, on threads and on processes: each case runs on every rank of a mesh.

A case makes unsharded tensors, hands this rank its pieces, and compares every result and every gradient with torch's in
float64 on the unsharded tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardfuse import DeviceMesh
from shardfuse.nn import AddRMSNorm, CrossEntropyLoss, RMSNorm, SwiGLU, redistribute

Placements = Sequence[Placement]
EPS = 1e-6


@dataclass
class Sample:
    """A tensor unsharded in float64, and this rank's piece of it (or summand) in the dtype of the case."""

    full: Tensor
    local: Tensor
    mesh: DeviceMesh
    placements: Placements

    def expect(self, got: Tensor, full: Tensor, eager: Tensor, what: str) -> None:
        """``got`` is this rank's piece of ``full``, at most as far from it as eager torch is, with the usual slack."""
        assert_close(
            got, cut(full, self.mesh, whole(self.placements)), cut(eager, self.mesh, whole(self.placements)), what
        )


def sample(mesh: DeviceMesh, placements: Placements, shape: Sequence[int], dtype: torch.dtype, seed: int) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    coordinate = coordinate_of(mesh)
    teams = [n if p.is_partial() else 1 for n, p in zip(mesh.shape, placements, strict=True)]
    summands = torch.randn(*teams, *shape, dtype=torch.float64, generator=generator).to(dtype)
    mine = summands[tuple(c if p.is_partial() else 0 for c, p in zip(coordinate, placements, strict=True))]
    full = summands.double().sum(dim=list(range(len(teams))))
    return Sample(full, cut(mine, mesh, placements).clone(), mesh, placements)


def cut(full: Tensor, mesh: DeviceMesh, placements: Placements) -> Tensor:
    for parallel_type, placement in zip(mesh.parallel_types, placements, strict=True):
        if isinstance(placement, Shard):
            full = mesh.shard_tensor(full, placement.dim, parallel_type=parallel_type)
    return full


def whole(placements: Placements) -> Placements:
    """Where the gradient of a tensor lives."""
    return [Replicate() if p.is_partial() else p for p in placements]


def along(placements: Placements, dim: int) -> Placements:
    """The placement of a vector along ``dim`` of a tensor."""
    return [Shard(0) if isinstance(p, Shard) and p.dim == dim else Replicate() for p in placements]


def assert_close(got: Tensor, full: Tensor, eager: Tensor, what: str) -> None:
    assert got.shape == full.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(full.shape)}"
    assert got.dtype == eager.dtype, f"{what}: {got.dtype}, expected {eager.dtype}"
    if got.numel() == 0:
        return
    error, eager_error = (rmse(x.double(), full) for x in (got, eager))
    slack = 2 if got.dtype in (torch.float32, torch.float64) and got.numel() >= 1000 else 3
    unit = torch.finfo(got.dtype).eps * full.square().mean().sqrt().item()
    assert error <= slack * max(eager_error, unit), f"{what}: error {error:.2e}, eager torch's {eager_error:.2e}"


def rmse(a: Tensor, b: Tensor) -> float:
    return (a - b).square().mean().sqrt().item()


def assert_same_on_all_ranks(tensor: Tensor, what: str) -> None:
    """Replicas are bitwise equal."""
    if dist.is_initialized():
        everyone: list[Tensor] = [tensor] * dist.get_world_size()
        dist.all_gather_object(everyone, tensor.detach().cpu())
        for rank, other in enumerate(everyone):
            assert torch.equal(other, everyone[0]), f"{what} of rank {rank} differs from rank 0's"


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


# --- norms -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norm:
    """Placements of one use of RMSNorm or AddRMSNorm; ``residual`` None is RMSNorm."""

    x: Placements
    residual: Placements | None
    output: Placements
    output_grad: Placements
    shape: tuple[int, ...] = (2, 8, 16)

    @property
    def at(self) -> Placements:
        if self.residual is not None:
            return self.residual
        return self.output if any(p.is_partial() for p in self.x) else self.x


def reference_norm(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> tuple[Tensor, ...]:
    total = x if bias is None else x + bias
    total = total if residual is None else residual + total
    normed = F.rms_norm(total, weight.shape, weight.to(total.dtype), EPS)
    return (normed,) if residual is None else (normed, total)


def check_norm(here: Here, case: Norm, dtype: torch.dtype, bias: bool) -> None:
    hidden, last = case.shape[-1], len(case.shape) - 1
    names = [p if not isinstance(p, Shard) or p.dim != last else Shard(-1) for p in case.at]
    x = here.sample(case.x, case.shape, dtype, 1)
    weight = here.sample(along(case.at, last), [hidden], dtype, 2)
    d_normed = here.sample(case.output_grad, case.shape, dtype, 3)
    tensors, gradients = [x, weight], [d_normed]
    b = here.sample(along(case.at, last), [hidden], dtype, 4) if bias else None
    residual = None if case.residual is None else here.sample(case.residual, case.shape, dtype, 5)
    if b is not None:
        tensors.append(b)
    if residual is not None and case.residual is not None:
        tensors.append(residual)
        gradients.append(here.sample(case.residual, case.shape, dtype, 6))

    where = {"mesh": here.mesh, "device": here.device, "input": case.x, "output": case.output, "output_grad": case.output_grad, "dtype": dtype}
    if residual is None:
        where |= {"input": names} if case.at is case.x else {"output": names}
        module: RMSNorm | AddRMSNorm = RMSNorm(hidden, EPS, **where)
    else:
        module = AddRMSNorm(hidden, EPS, bias, residual=names, **where)
    with torch.no_grad():
        module.weight.copy_(weight.local)
        if b is not None and module.bias is not None:
            module.bias.copy_(b.local)
    inputs = [leaf(x.local)] + ([] if residual is None else [leaf(residual.local)])
    results = module(*inputs) if residual is not None else (module(*inputs),)
    torch.autograd.backward(results, [g.local for g in gradients])

    outcomes = []
    for convert in (torch.Tensor.double, lambda t: t.to(dtype)):
        leaves = [leaf(convert(t.full)) for t in tensors]
        optional = iter(leaves[2:])
        out = reference_norm(
            leaves[0], leaves[1], next(optional) if bias else None, next(optional) if residual is not None else None
        )
        torch.autograd.backward(out, [convert(g.full) for g in gradients])
        outcomes.append(([t.detach() for t in out], [t.grad for t in leaves]))
    (full_out, full_grad), (eager_out, eager_grad) = outcomes

    normed = Sample(full_out[0], x.local, here, case.output)
    normed.expect(results[0].detach(), full_out[0], eager_out[0], "normed")
    if residual is not None:
        residual.expect(results[1].detach(), full_out[1], eager_out[1], "new residual")
    found = [inputs[0].grad, module.weight.grad, *([module.bias.grad] if bias else []), *(i.grad for i in inputs[1:])]
    labels = ["dx", "dweight", *(["dbias"] if bias else []), "dresidual"]
    for label, tensor, got, full, eager in zip(labels, tensors, found, full_grad, eager_grad, strict=False):
        tensor.expect(got, full, eager, label)
    if all(not isinstance(p, Shard) for p in along(case.at, last)):
        assert_same_on_all_ranks(module.weight.grad, "dweight")
    if all(not isinstance(p, Shard) for p in case.output):
        assert_same_on_all_ranks(results[0], "normed")


R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)

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
    "rms_2d": Norm([S0, S1], None, [S0, R], [S0, P], (4, 4, 16)),
    "add_2d": Norm([S0, P], [S0, S1], [S0, R], [S0, P], (4, 4, 16)),
    "add_2d_hidden": Norm([S0, P], [S0, S2], [S0, S2], [S0, S2], (4, 4, 16)),
    "add_2d_both_rows": Norm([S1, S1], [S1, S1], [S1, S1], [S1, S1], (2, 8, 16)),
}

# --- SwiGLU ------------------------------------------------------------------------------------------------


def check_swiglu(
    mesh: DeviceMesh, placements: Placements, shape: tuple[int, ...], dtype: torch.dtype, bias: bool
) -> None:
    last = len(shape) - 1
    tensors = [here.sample(placements, shape, dtype, seed) for seed in (1, 2)]
    tensors += [here.sample(along(placements, last), [shape[-1]], dtype, seed) for seed in (3, 4)][: 2 * bias]
    gradient = here.sample(placements, shape, dtype, 5)
    names = [Shard(-1) if isinstance(p, Shard) and p.dim == last else p for p in placements]
    module = SwiGLU(shape[-1], bias, mesh=here.mesh, input=names, device=here.device, dtype=dtype)
    with torch.no_grad():
        for parameter, value in zip((module.gate_bias, module.up_bias), tensors[2:], strict=False):
            parameter.copy_(value.local)
    inputs = [leaf(t.local) for t in tensors[:2]]
    result = module(*inputs)
    result.backward(gradient.local)

    outcomes = []
    for convert in (torch.Tensor.double, lambda t: t.to(dtype)):
        leaves = [leaf(convert(t.full)) for t in tensors]
        gate, up = (leaves[0] + leaves[2], leaves[1] + leaves[3]) if bias else leaves
        out = F.silu(gate) * up
        out.backward(convert(gradient.full))
        outcomes.append([out.detach(), *(t.grad for t in leaves)])
    gradient.expect(result.detach(), outcomes[0][0], outcomes[1][0], "result")
    found = [i.grad for i in inputs] + ([module.gate_bias.grad, module.up_bias.grad] if bias else [])
    for k, (tensor, got) in enumerate(zip(tensors, found, strict=True)):
        tensor.expect(got, outcomes[0][k + 1], outcomes[1][k + 1], ("dgate", "dup", "dgate_bias", "dup_bias")[k])


SWIGLUS_1D = {
    "columns": ([S2], (2, 5, 16)),
    "uneven_columns": ([S2], (2, 5, 10)),
    "rows": ([S0], (4, 5, 16)),
    "replicated": ([R], (2, 5, 16)),
}
SWIGLUS_2D = {"rows_and_columns": ([S0, S2], (4, 3, 16))}

# --- cross entropy -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    logits: Placements
    shape: tuple[int, ...] = (4, 8, 12)
    reduction: str = "mean"
    ignored: int = 3
    label_smoothing: float = 0.0
    scale: float = 1.0


def check_loss(here: Here, case: Loss, dtype: torch.dtype) -> None:
    last, classes = len(case.shape) - 1, case.shape[-1]
    logits = here.sample(case.logits, case.shape, dtype, 1)
    logits.full, logits.local = logits.full * case.scale, logits.local * case.scale
    rows = [R if isinstance(p, Shard) and p.dim == last else p for p in case.logits]
    generator = torch.Generator().manual_seed(2)
    target = torch.randint(classes, case.shape[:-1], generator=generator).to(here.device)
    target.view(-1)[: case.ignored] = -100
    result_at = rows if case.reduction == "none" else [R] * here.mesh.ndim
    gradient = here.sample(result_at, case.shape[:-1] if case.reduction == "none" else (), torch.float32, 3)
    names = [Shard(-1) if isinstance(p, Shard) and p.dim == last else p for p in case.logits]
    module = CrossEntropyLoss(
        mesh=here.mesh, logits=names, reduction=case.reduction, label_smoothing=case.label_smoothing, num_classes=classes
    )
    given = leaf(logits.local)
    result = module(given, here.cut(target, rows))
    result.backward(gradient.local.to(result.dtype))

    outcomes = []
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    for full_dtype, loss_dtype in ((torch.float64, torch.float64), (dtype, statistics)):
        full = leaf(logits.full.to(full_dtype))
        loss = F.cross_entropy(
            full.flatten(0, -2).to(loss_dtype),
            target.flatten(),
            reduction=case.reduction,
            label_smoothing=case.label_smoothing,
        )
        loss = loss.view(target.shape) if case.reduction == "none" else loss
        loss.backward(gradient.full.to(loss_dtype))
        outcomes.append((loss.detach(), full.grad))
    gradient.expect(result.detach(), outcomes[0][0], outcomes[1][0], "loss")
    logits.expect(given.grad, outcomes[0][1], outcomes[1][1], "dlogits")
    if case.reduction != "none":
        assert_same_on_all_ranks(result, "loss")


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

MOVES_1D: dict[str, tuple[Placements, Placements, Placements | None]] = {
    "slice": ([R], [S1], None),
    "gather": ([S1], [R], [P]),
    "gather_replicated_gradient": ([S0], [R], None),
    "reduce": ([P], [R], None),
    "reduce_scatter": ([P], [S1], None),
    "all_to_all": ([S0], [S1], None),
}
MOVES_2D: dict[str, tuple[Placements, Placements, Placements | None]] = {
    "gather_inner": ([S0, S1], [S0, R], [S0, P]),
    "slice_both": ([R, R], [S0, S1], None),
}


def check_redistribute(here: Here, source: Placements, target: Placements, grad: Placements | None) -> None:
    shape = (8, 4, 3)
    x = here.sample(source, shape, torch.float64, 1)
    gradient = here.sample(target if grad is None else grad, shape, torch.float64, 2)
    given = leaf(x.local)
    result = redistribute(given, here.mesh, source, target, grad=grad)
    result.backward(gradient.local)
    Sample(x.full, x.local, here, target).expect(result.detach(), x.full, x.full, "result")
    x.expect(given.grad, gradient.full, gradient.full, "gradient")


# --- all of them -------------------------------------------------------------------------------------------

FEW = ("add_sequence_parallel", "rms_gather", "rms_hidden", "rms_many_rows", "columns", "classes", "rows_sequence", "wide")
"""Names of the cases that are run in dtypes other than float64 too."""

Check = Callable[[Here], None]


def on_line() -> dict[str, Check]:
    """Cases for a 1-D mesh, by name."""
    found: dict[str, Check] = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        kind = str(dtype).removeprefix("torch.")
        for name, norm in NORMS_1D.items():
            found[f"{name}-{kind}"] = partial(check_norm, case=norm, dtype=dtype, bias=norm.residual is not None)
        for name, (placements, shape) in SWIGLUS_1D.items():
            found[f"swiglu_{name}-{kind}"] = partial(check_swiglu, placements=placements, shape=shape, dtype=dtype, bias=True)
        for name, loss in LOSSES_1D.items():
            found[f"loss_{name}-{kind}"] = partial(check_loss, case=loss, dtype=dtype)
    few = tuple(prefix + name + "-" for name in FEW for prefix in ("", "swiglu_", "loss_"))
    found = {name: check for name, check in found.items() if name.endswith("float64") or name.startswith(few)}
    for name, (source, target, grad) in MOVES_1D.items():
        found[f"redistribute_{name}"] = partial(check_redistribute, source=source, target=target, grad=grad)
    return found


def on_square() -> dict[str, Check]:
    """Cases for a 2-D mesh, by name."""
    dtype = torch.float64
    found: dict[str, Check] = {}
    for name, norm in NORMS_2D.items():
        found[name] = partial(check_norm, case=norm, dtype=dtype, bias=norm.residual is not None)
    for name, (placements, shape) in SWIGLUS_2D.items():
        found[f"swiglu_{name}"] = partial(check_swiglu, placements=placements, shape=shape, dtype=dtype, bias=True)
    for name, loss in LOSSES_2D.items():
        found[f"loss_{name}"] = partial(check_loss, case=loss, dtype=dtype)
    for name, (source, target, grad) in MOVES_2D.items():
        found[f"redistribute_{name}"] = partial(check_redistribute, source=source, target=target, grad=grad)
    return found
