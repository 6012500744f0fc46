"""shardfuse.nn on DTensors whose shards differ in size, are of one element or empty, against torch unsharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from dtensor_cases import distribute, make_mesh, numbers
from nn_cases import EPS, S0, S1, P, R
from ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional
from torch_answers import assert_beside
from uneven_cases import UNEVEN, Check, Placements

from shardfuse import DeviceMesh
from shardfuse.errors import ModuleInputError, ProgramMismatchError
from shardfuse.nn import AddRMSNorm, CrossEntropyLoss, RMSNorm, SwiGLU, redistribute


def on_ranks(mesh_shape: Sequence[int], run: Callable[[Check, Placements], None], but: Sequence[str] = ()) -> None:
    """Every case of this mesh, in one world."""
    names = [name for name, case in UNEVEN.items() if case[0] == mesh_shape and name not in but]

    def rank_main(rank: int, size: int) -> None:
        mesh = make_mesh(mesh_shape)
        for name in names:
            _, placements, shape = UNEVEN[name]
            try:
                run(Check(mesh, placements, shape), placements)
            except Exception as error:
                error.add_note(f"case {name}")
                raise

    assert names
    run_ranks(torch.Size(mesh_shape).numel(), rank_main)


ON_BOTH = pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)


def rms_norm(x: Tensor, weight: Tensor) -> list[Tensor]:
    return [functional.rms_norm(x, weight.shape, weight, EPS)]


@ON_BOTH
def test_rms_norm(mesh_shape: Sequence[int]) -> None:
    def run(case: Check, where: Placements) -> None:
        module = RMSNorm(case.shape[-1], mesh=case.ours, input=where, dtype=torch.float64)
        x = case.activation()
        case.parameter(module, "weight")
        case.compare([module(x)], [case.at], rms_norm)

    on_ranks(mesh_shape, run)


@ON_BOTH
def test_add_rms_norm(mesh_shape: Sequence[int]) -> None:
    """Partial sums go in, and what is gathered comes out, whose gradient is of partial sums."""

    def run(case: Check, where: Placements) -> None:
        n = case.mesh.ndim
        module = AddRMSNorm(
            case.shape[-1], EPS, bias=True, mesh=case.ours, dtype=torch.float64,
            input=[P] * n, residual=where, output=[R] * n, output_grad=[P] * n,
        )  # fmt: skip
        x, residual = case.activation([P] * n), case.activation()
        for name in ("weight", "input_bias"):
            case.parameter(module, name)

        def function(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
            total = residual + (x + bias)
            return [*rms_norm(total, weight), total]

        case.compare(module(x, residual), [[R] * n, case.at], function, [[P] * n, case.at])

    on_ranks(mesh_shape, run, but=["vector"])


@ON_BOTH
def test_swiglu(mesh_shape: Sequence[int]) -> None:
    def run(case: Check, where: Placements) -> None:
        module = SwiGLU(case.shape[-1], bias=True, mesh=case.ours, input=where, dtype=torch.float64)
        gate, up = case.activation(), case.activation()
        for name in ("gate_bias", "up_bias"):
            case.parameter(module, name)
        case.compare([module(gate, up)], [case.at], lambda a, b, c, d: [functional.silu(a + c) * (b + d)])
        unknown = SwiGLU(mesh=case.ours, input=where)
        whole = functional.silu(case.leaves[0][1]) * case.leaves[1][1]
        own = distribute(whole, case.mesh, case.at).to_local()
        assert_beside(unknown(gate, up).to_local(), own)

    on_ranks(mesh_shape, run)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@ON_BOTH
def test_cross_entropy(mesh_shape: Sequence[int], reduction: str) -> None:
    def run(case: Check, where: Placements) -> None:
        n, last = case.mesh.ndim, len(case.shape) - 1
        module = CrossEntropyLoss(mesh=case.ours, logits=where, reduction=reduction, label_smoothing=0.1)
        rows = [R if isinstance(p, Shard) and p.dim == last else p for p in case.at]
        target = torch.arange(torch.Size(case.shape[:-1]).numel()).reshape(case.shape[:-1]) % case.shape[-1]

        def function(x: Tensor) -> list[Tensor]:
            options = {"reduction": reduction, "label_smoothing": 0.1}
            loss = functional.cross_entropy(x.flatten(0, -2), target.flatten(), **options)
            return [loss if reduction == "mean" else loss.view(target.shape)]

        loss = module(case.activation(), distribute(target, case.mesh, rows))
        case.compare([loss], [[R] * n if reduction == "mean" else rows], function)

    on_ranks(mesh_shape, run, but=["vector", "no_row"])


@pytest.mark.parametrize(
    ("source", "target", "grad"),
    [(S0, S1, None), (S0, R, P), (P, S0, None), (R, S1, None), (S1, R, None)],
    ids=str,
)
@pytest.mark.parametrize("shape", [(5, 3), (1, 6), (2, 0)], ids=str)
def test_redistribute(source: Placement, target: Placement, grad: Placement | None, shape: Sequence[int]) -> None:
    def run(rank: int, size: int) -> None:
        case = Check(make_mesh((4,)), [source], shape)
        moved = redistribute(case.activation(), case.ours, source, target, grad=grad)
        case.compare([moved], [[target]], lambda x: [x.clone()], None if grad is None else [[grad]])

    run_ranks(4, run)


def test_tensors_that_do_not_belong_together() -> None:
    """Ranks 0 and 1 see like shards of both: they are told as the others are."""

    def run(rank: int, size: int) -> None:
        mesh = make_mesh((4,))
        ours = DeviceMesh(mesh.mesh)
        x, y = (distribute(torch.ones(n, 6), mesh, [S0]) for n in (5, 6))
        for call in (AddRMSNorm(6, mesh=ours, input=S0, residual=S0), SwiGLU(mesh=ours, input=S0)):
            with pytest.raises(ModuleInputError, match=r"shape \(6, 6\), expected \(5, 6\)"):
                call(x, y)
        target = distribute(torch.zeros(6, dtype=torch.int64), mesh, [S0])
        with pytest.raises(ModuleInputError, match="a target for each row"):
            CrossEntropyLoss(mesh=ours, logits=S0)(x, target)

    run_ranks(4, run)


def test_local_shards_of_a_told_whole() -> None:
    """Plain tensors: ranks have 3, 3, 3 and 1 of 10 rows."""
    x, y = numbers((10, 6), 0, torch.float64), numbers((10, 6), 1, torch.float64)
    target = torch.arange(10) % 6
    full = x.clone().requires_grad_()
    expected = [
        functional.rms_norm(full, (6,), None, EPS),
        functional.silu(full) * y,
        functional.cross_entropy(full, target),
        full.clone(),
    ]
    gradients = [torch.autograd.grad(t.sum(), full, retain_graph=True)[0] for t in expected]

    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(list(range(size)))
        local = x.chunk(4)[rank].clone().requires_grad_()
        norm = RMSNorm(6, EPS, mesh=mesh, input=S0, dtype=torch.float64)
        found = [
            norm(local, unsharded=x.shape),
            SwiGLU(mesh=mesh, input=S0)(local, y.chunk(4)[rank], unsharded=x.shape),
            CrossEntropyLoss(mesh=mesh, logits=S0)(local, target.chunk(4)[rank], unsharded=x.shape),
            redistribute(local, mesh, S0, R, unsharded=x.shape),
        ]
        for own, want, whole in zip(found, expected, gradients, strict=True):
            assert_beside(own, want if own.shape == want.shape else want.chunk(4)[rank])
            (grad,) = torch.autograd.grad(own.sum(), local)
            assert_beside(grad, whole.chunk(4)[rank])
        with pytest.raises(ProgramMismatchError, match=r"rank 3 has `T0: unsharded \[4, 6\]`.*unsharded= of a module"):
            norm(local)

    run_ranks(4, run)


def test_an_unsharded_shape_that_does_not_fit_is_refused() -> None:
    """Of pieces of one size, which need none; one that fits is taken."""
    x, target = numbers((8, 6), 0, torch.float64), torch.arange(8) % 6

    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(list(range(size)))
        local, own = x.chunk(size)[rank], target.chunk(size)[rank]
        norm = RMSNorm(6, EPS, mesh=mesh, input=S0, dtype=torch.float64)
        loss = CrossEntropyLoss(mesh=mesh, logits=S0)
        calls: list[Callable[[Sequence[int]], object]] = [
            lambda whole: norm(local, unsharded=whole),
            lambda whole: SwiGLU(mesh=mesh, input=S0)(local, local, unsharded=whole),
            lambda whole: loss(local, own, unsharded=whole),
            lambda whole: redistribute(local, mesh, S0, R, unsharded=whole),
        ]
        for call in calls:
            for _ in range(2):
                with pytest.raises(ModuleInputError, match=r"unsharded has sizes \[12, 6\].*this rank has \[4, 6\]"):
                    call((12, 6))
            call((8, 6))

    run_ranks(2, run)
