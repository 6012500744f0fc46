"""Modules of shardfuse.nn on DTensors whose shards differ in size, compiled and not, against torch unsharded.

Of tensors that collect a gradient, as they are or transposed, and of results of other ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from dtensor_cases import distribute, make_mesh, numbers
from nn_cases import EPS, S0, S1, P, R, along
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch._aot_autograd import schemas
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.nn import functional
from uneven_cases import LAST, Check, Placements

from shardfuse import DeviceMesh
from shardfuse.nn import AddRMSNorm, CrossEntropyLoss, RMSNorm, SwiGLU
from shardfuse.nn.symbolic_strides import mend_symbolic_strides, reads_sizes_as_strides

pytestmark = [pytest.mark.mpi]
Call = Callable[[torch.nn.Module], torch.nn.Module]
CASES = [([S0], (5, 6)), ([S1], (2, 7, 6)), ([LAST], (3, 5)), ([S0], (1, 6))]
ON_FOUR = [([S0, S1], (3, 5, 6)), ([S0, R], (3, 6)), ([S1, LAST], (1, 5, 7))]


def eager(module: torch.nn.Module) -> torch.nn.Module:
    return module


def compiled(module: torch.nn.Module, dynamic: bool | None = None) -> torch.nn.Module:
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)  # pyright: ignore[reportReturnType]


def dynamic(module: torch.nn.Module) -> torch.nn.Module:
    return compiled(module, dynamic=True)


ON_TWO = pytest.param(dynamic, marks=pytest.mark.two_ranks_suffice)


class Of(Check):
    """Activations of a kind, and parameters as ``parameters`` says, of this rank's tests."""

    kind, parameters = "leaf", "local"

    def activation(self, placements: Placements | None = None) -> DTensor:
        given = super().activation(placements)
        if self.kind == "result":
            return given * 1.0  # pyright: ignore[reportReturnType]
        if self.kind == "transposed":
            _, full, at = self.leaves[-1]
            local = given.detach().to_local().transpose(0, -1).contiguous().transpose(0, -1)
            stride = full.transpose(0, -1).contiguous().transpose(0, -1).stride()
            made = DTensor.from_local(
                local, self.mesh, given.placements, run_check=False, shape=full.shape, stride=stride
            )
            given = made.detach().requires_grad_()  # pyright: ignore[reportAssignmentType]
            self.leaves[-1] = (given, full, at)
        return given

    def parameter(self, module: torch.nn.Module, name: str) -> None:
        if self.parameters == "local":
            super().parameter(module, name)
            return
        full, at = numbers(self.shape[-1:], 10 + len(self.leaves), torch.float64), along(self.at, len(self.shape) - 1)
        made = torch.nn.Parameter(distribute(full, self.mesh, at))
        setattr(module, name, made)
        self.leaves.append((made, full, at))

    def compare(
        self,
        results: Sequence[Tensor],
        where: Sequence[Placements],
        function: Callable[..., Sequence[Tensor]],
        upstream: Sequence[Placements] | None = None,
    ) -> None:
        """As Check's, and gradients live where their leaves do, and have their strides."""
        super().compare(results, where, function, upstream)
        for leaf, _, at in self.leaves:
            grad = leaf.grad
            if isinstance(grad, DTensor):
                assert tuple(grad.placements) == tuple(at)
                for a, b in ((grad, leaf), (grad.to_local(), leaf.to_local())):
                    dims = [dim for dim, size in enumerate(a.shape) if size > 1]
                    assert not a.numel() or [a.stride(dim) for dim in dims] == [b.stride(dim) for dim in dims]


def rms_norm(x: Tensor, weight: Tensor) -> list[Tensor]:
    return [functional.rms_norm(x, weight.shape, weight, EPS)]


def check_norm(case: Of, where: Placements, way: Call) -> None:
    module = RMSNorm(case.shape[-1], mesh=case.ours, input=where, dtype=torch.float64, parameters=case.parameters)
    x = case.activation()
    case.parameter(module, "weight")
    case.compare([way(module)(x)], [case.at], rms_norm)


def check_add_norm(case: Of, where: Placements, way: Call) -> None:
    """Partial sums in, replicas out, whose gradient is of partial sums: more of them than the input's own."""
    n = case.mesh.ndim
    module = AddRMSNorm(
        case.shape[-1], EPS, bias=True, mesh=case.ours, dtype=torch.float64, parameters=case.parameters,
        input=[P] * n, residual=where, output=[R] * n, output_grad=[P] * n,
    )  # fmt: skip
    x, residual = case.activation([P] * n), case.activation()
    for name in ("weight", "input_bias"):
        case.parameter(module, name)

    def function(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        total = residual + (x + bias)
        return [*rms_norm(total, weight), total]

    case.compare(way(module)(x, residual), [[R] * n, case.at], function, [[P] * n, case.at])


def check_swiglu(case: Of, where: Placements, way: Call) -> None:
    module = SwiGLU(
        case.shape[-1], bias=True, mesh=case.ours, input=where, dtype=torch.float64, parameters=case.parameters
    )
    gate, up = case.activation(), case.activation()
    for name in ("gate_bias", "up_bias"):
        case.parameter(module, name)
    case.compare([way(module)(gate, up)], [case.at], lambda a, b, c, d: [functional.silu(a + c) * (b + d)])


def check_loss(case: Of, where: Placements, way: Call) -> None:
    last = len(case.shape) - 1
    module = CrossEntropyLoss(mesh=case.ours, logits=where)
    rows = [R if isinstance(p, Shard) and p.dim == last else p for p in case.at]
    target = torch.arange(torch.Size(case.shape[:-1]).numel()).reshape(case.shape[:-1]) % case.shape[-1]
    given = distribute(target, case.mesh, rows)

    def function(x: Tensor) -> list[Tensor]:
        return [functional.cross_entropy(x.flatten(0, -2), target.flatten())]

    case.compare([way(module)(case.activation(), given)], [[R] * case.mesh.ndim], function)


CHECKS = [check_norm, check_add_norm, check_swiglu, check_loss]


def run(pg, check: Callable[[Of, Placements, Call], None], kind: str, parameters: str, way: Call) -> None:
    meshes = [((2, 2), ON_FOUR)] * (pg.size == 4)
    if way is not compiled or pg.size != 4:  # a graph over one dimension of a mesh is that of two ranks
        meshes.append(((pg.size,), CASES))
    for shape, cases in meshes:
        mesh = make_mesh(shape, pg.device.type)
        for placements, sizes in cases:
            case = Of(mesh, placements, sizes)
            case.kind, case.parameters = kind, parameters
            check(case, placements, way)


@pytest.mark.parametrize("way", [eager, compiled, ON_TWO])
@pytest.mark.parametrize("kind", ["leaf", "result", "transposed"])
def test_norm(kind: str, way: Call, pg) -> None:
    run(pg, check_norm, kind, "local" if way is compiled else "dtensor", way)


@pytest.mark.parametrize("way", [compiled, ON_TWO])
@pytest.mark.parametrize("check", CHECKS[1:])
def test_modules(check: Callable[[Of, Placements, Call], None], way: Call, pg) -> None:
    run(pg, check, "leaf", "dtensor", way)


@pytest.mark.two_ranks_suffice
def test_sizes_after_one_another(pg) -> None:
    """torch.compile takes sizes as symbols when a second one comes."""
    mesh = make_mesh((pg.size,), pg.device.type)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    module = RMSNorm(6, EPS, mesh=DeviceMesh.from_torch(mesh), input=S1, dtype=torch.float64).to(pg.device)
    call = torch.compile(module, fullgraph=True, backend=counter)
    for rows in (11, 15, 19, 23):  # each changes all pieces, whose sizes torch guards
        module.zero_grad()
        case = Of(mesh, [S1], (2, rows, 6))
        x = case.activation()
        case.leaves.append((module.weight, torch.ones(6, dtype=torch.float64), [R]))
        case.compare([call(x)], [case.at], rms_norm)
    assert counter.frame_count == 2


def test_strides_that_are_symbols_are_read_behind_sizes(pg) -> None:
    mend_symbolic_strides()
    assert not reads_sizes_as_strides(schemas.SubclassCreationMeta.compute_outer_size_and_stride)


@pytest.mark.two_ranks_suffice
@pytest.mark.parametrize("way", [compiled, dynamic])
@pytest.mark.parametrize(("at", "rows"), [(S0, 6), (S0, 3), (R, 4)])
def test_gate_and_up_in_one_dtensor(at: Placement, rows: int, way: Call, pg) -> None:
    mesh, whole = make_mesh((pg.size,)), numbers((rows, 10))
    module = SwiGLU(mesh=DeviceMesh.from_torch(mesh), input=at)
    found = way(module)(distribute(whole, mesh, [at]))
    assert found.shape == (rows, 5)
    gate, up = whole.double().chunk(2, -1)
    torch.testing.assert_close(found.full_tensor().double(), functional.silu(gate) * up)


@pytest.mark.two_ranks_suffice
@pytest.mark.parametrize("check", CHECKS)
def test_a_last_dim_that_is_cut_evenly(check: Callable[[Of, Placements, Call], None], pg) -> None:
    """A module fixes the size of this rank's piece: the size of the whole is no symbol by then."""
    check(Of(make_mesh((pg.size,), pg.device.type), [LAST], (3, 8)), [LAST], dynamic)
