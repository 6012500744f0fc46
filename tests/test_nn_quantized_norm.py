"""``quantized.AddRMSNorm`` on ranks that are threads, and without a mesh: each value within half a step of the exact.

The sum of summands is rounded to their dtype, as ``nn.AddRMSNorm`` has it: the exact norm is that of the rounded sum.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from dtensor_cases import distribute, make_mesh
from exchange_cases import plan_of
from module_cases import each_rank
from nn_cases import EPS, S0, S1, S2, Here, P, Placements, R, assert_same_on_all_ranks, named
from quantized_check import check
from ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from benchmarks.roundings import assert_near
from shardfuse import DeviceMesh
from shardfuse.errors import ModuleArgumentError, ModuleInputError, PlacementError
from shardfuse.in_kernel import exchanging
from shardfuse.nn import AddRMSNorm, quantized
from shardfuse.nn.default_eps import rms_norm_eps
from shardfuse.nn.quantized import Quantized
from shardfuse.nn.quantizing_fusions import ScaleKind

SHAPE = (2, 12, 512)
KINDS: tuple[ScaleKind, ...] = ("row", "block", "given")
GIVEN = torch.tensor([0.02])


def check_norm(
    here: Here,
    scales: ScaleKind,
    dtype: torch.dtype,
    input: Placements,
    residual: Placements,
    output: Placements | None = None,
    shape: tuple[int, ...] = SHAPE,
) -> None:
    """Values, scales and the new residual of this rank against torch's in float64 on unsharded tensors."""
    x, r = here.sample(input, shape, dtype, 1, 0.7), here.sample(residual, shape, dtype, 2)
    last, at = len(shape) - 1, output or residual
    weight = torch.randn(shape[-1], generator=torch.Generator().manual_seed(3)).to(dtype)
    placed = {"mesh": here.mesh, "input": named(input, last), "residual": named(residual, last), "dtype": dtype}
    made = quantized.AddRMSNorm(shape[-1], EPS, scales=scales, output=named(at, last), device=here.device, **placed)
    plain = AddRMSNorm(shape[-1], EPS, device=here.device, **placed)
    for module in (made, plain):
        module.load_state_dict({"weight": weight})
    given = (GIVEN.to(here.device),) if scales == "given" else ()
    is_uneven = any(n % here.mesh.size for n in shape[:-1])
    summed = x.full.to(dtype).double() + r.full
    wide = summed * torch.rsqrt(summed.square().mean(-1, keepdim=True) + EPS) * weight.to(here.device).double()
    for _ in range(2):  # what is bound, and what is known again
        found, total = made(x.local, r.local, *given, unsharded=shape if is_uneven else None)
        _check_quantized(here, found, wide, at, scales)
        terms = here.cut(x.size + r.full.abs(), residual)
        half = max(here.mesh.size // 2, 1)  # additions round by half a rounding of what is added up
        assert_near(total, here.cut(summed, residual), n=half, rows=None, terms=terms, what="new residual")
        with torch.no_grad():
            assert torch.equal(total, plain(x.local, r.local, unsharded=shape if is_uneven else None)[1])
        for t in (*found, total) if at == residual == [R] else ():
            assert_same_on_all_ranks(t.view(torch.uint8) if t.itemsize == 1 else t, "a result")


def _check_quantized(here: Here, found: Quantized, wide: Tensor, at: Placements, scales: ScaleKind) -> None:
    mine, columns = here.cut(wide, at), Shard(wide.ndim - 1)
    if scales == "row":
        rows = [R if p == columns else p for p in at]  # of a row that is cut the scale is of all of it
        top = here.cut(wide.abs().amax(-1, keepdim=True), rows) / torch.finfo(torch.float8_e4m3fn).max
        assert_near(found.scales, top, n=8, rows=None, what="scales")
    check(found, mine, torch.float8_e4m3fn, "block" if scales == "block" else found.scales)
    assert scales != "block" or found.scales.movedim(-1, 0).is_contiguous()


CASES: dict[str, Callable[[Here], None]] = {
    f"{name}, {scales}, {dtype}": partial(check_norm, scales=scales, dtype=dtype, **options)
    for name, options in {
        "summands": {"input": [P], "residual": [R]},
        "summands, rows of the residual": {"input": [P], "residual": [S1], "output": [R]},
        "summands, rows of the output": {"input": [P], "residual": [S1]},
        "rows": {"input": [S0], "residual": [S0]},
        "columns": {"input": [S2], "residual": [S2]},
        "uneven rows": {"input": [S1], "residual": [S1], "shape": (2, 7, 256)},
        "uneven rows of summands": {"input": [P], "residual": [S0], "output": [R], "shape": (5, 256)},
    }.items()
    for scales in KINDS
    for dtype in (torch.float32, torch.bfloat16)
}


def test_on_a_line_of_ranks() -> None:
    each_rank((2,), CASES)


def test_on_more_ranks() -> None:
    """Of a mesh of two dimensions, of which one has the summands and the other cuts rows."""
    square: dict[str, Callable[[Here], None]] = {
        scales: partial(check_norm, scales=scales, dtype=torch.float32, input=[S0, P], residual=[S0, R])
        for scales in KINDS
    }
    each_rank((2, 2), square)
    each_rank((4,), {name: case for name, case in CASES.items() if "summands, " in name and "32" in name})


@pytest.mark.parametrize("scales", KINDS)
@pytest.mark.parametrize("compiled", [False, True])
def test_without_a_mesh_it_is_the_function(scales: ScaleKind, compiled: bool) -> None:
    x, r, bias, weight = (torch.randn(n).bfloat16() for n in (SHAPE, SHAPE, SHAPE[-1:], SHAPE[-1:]))
    module = quantized.AddRMSNorm(SHAPE[-1], None, True, scales=scales, zero_centered=True, dtype=torch.bfloat16)
    module.load_state_dict({"weight": weight, "input_bias": bias})
    given = (GIVEN,) if scales == "given" else ()
    call: Any = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    found, total = call(x, r, *given)
    summed = x.double() + r.double() + bias.double()
    wide = functional.rms_norm(summed, SHAPE[-1:], 1 + weight.double(), rms_norm_eps(torch.bfloat16))
    check(found, wide, torch.float8_e4m3fn, GIVEN if given else scales)
    assert_near(total, summed, n=1, rows=None)
    assert scales != "block" or found.scales.movedim(-1, 0).is_contiguous()
    one, _ = module(x[0, 0], r[0, 0], *given)
    assert [t.shape for t in one] == [SHAPE[-1:], (1,) if scales != "block" else (4,)]
    check(one, wide[0, 0], torch.float8_e4m3fn, GIVEN if given else scales)


@pytest.mark.parametrize("scales", KINDS)
def test_dtensors(scales: ScaleKind) -> None:
    """Summands, rows and columns; results are DTensors of the unsharded shape."""

    def run(rank: int, size: int) -> None:
        mesh, torch_mesh = DeviceMesh(list(range(size))), make_mesh((size,))
        given = (GIVEN,) if scales == "given" else ()
        x, r = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
        wide = functional.rms_norm((x + r).double(), SHAPE[-1:], None, EPS)
        for input, at in (([P], [R]), ([S0], [S0]), ([S2], [S2])):
            placed = {"input": named(input, 2), "residual": named(at, 2)}
            module = quantized.AddRMSNorm(SHAPE[-1], EPS, scales=scales, mesh=mesh, **placed)
            local = x / size if input == [P] else x
            dx = DTensor.from_local(local, torch_mesh, [P]) if input == [P] else distribute(x, torch_mesh, input)
            found, total = module(dx, distribute(r, torch_mesh, at), *given)
            rows = at if scales == "block" else [R if p == S2 else p for p in at]
            assert [list(t.placements) for t in (found.values, total)] == [at, at]
            assert scales == "given" or list(found.scales.placements) == rows
            assert_near(total.full_tensor(), (x + r).double(), n=2, rows=None)
            pieces: list[Tensor] = [torch.empty(0)] * size  # of bytes: float8 is neither added up nor pickled
            torch.distributed.all_gather_object(pieces, found.values.to_local().view(torch.uint8))
            dim = {S0: 0, S2: 2}.get(at[0])
            values = (pieces[0] if dim is None else torch.cat(pieces, dim)).view(torch.float8_e4m3fn)
            made = found.scales if given else found.scales.full_tensor()
            check(Quantized(values, made), wide, torch.float8_e4m3fn, GIVEN if given else scales)

    run_ranks(2, run)


def test_the_sum_of_ranks_is_exchanged_inside_of_the_kernel() -> None:
    """All of it is one kernel, but for a view of blocks."""

    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(list(range(size)))
        for scales in KINDS:
            module = quantized.AddRMSNorm(8192, scales=scales, mesh=mesh, input=P, dtype=torch.bfloat16)
            x = torch.randn(4, 8192).bfloat16()
            given = (GIVEN,) if scales == "given" else ()
            module(x, x, *given)
            (bound,) = module._bound.values()
            assert bound is not None
            plan = plan_of(bound.op.forward, 4)
            assert len(exchanging(plan)) == 1, plan.in_kernel
            assert {s.scheduler for s in plan.segments} <= {"exchange", "no_op"}

    run_ranks(2, run)


MESH = DeviceMesh([0, 1])
X = torch.ones(3, 256)
BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no mesh": (lambda: quantized.AddRMSNorm(256, input=P), PlacementError, "input=P.* does not fit no mesh: pass"),
    "partial output": (
        lambda: quantized.AddRMSNorm(256, mesh=MESH, output=P), PlacementError, "output=P.* does not fit a norm",
    ),
    "partial residual": (
        lambda: quantized.AddRMSNorm(256, mesh=MESH, residual=P), PlacementError, "residual=P.* does not fit a norm",
    ),
    "an input along columns": (
        lambda: quantized.AddRMSNorm(256, mesh=MESH, input=Shard(-1)), PlacementError, "input=.* does not fit residual",
    ),
    "hidden size": (
        lambda: quantized.AddRMSNorm(200, scales="block"), ModuleArgumentError,
        r"AddRMSNorm\(hidden_size=200\): expected a multiple of 128, for scales of blocks",
    ),
    "blocks that ranks share": (
        lambda: quantized.AddRMSNorm(
            384, scales="block", mesh=MESH, residual=Shard(-1), input=Shard(-1), parameters="local"
        ), ModuleArgumentError, "hidden_size=384.*: expected a multiple of 2 x 128, the blocks of each rank",
    ),
    "scales": (lambda: quantized.AddRMSNorm(256, scales="column"), ModuleArgumentError, "scales="),  # pyright: ignore[reportArgumentType]
    "values": (
        lambda: quantized.AddRMSNorm(256, values_dtype=torch.int8), ModuleArgumentError, "values_dtype=.*float8_e5m2",
    ),
    "no scale": (
        lambda: quantized.AddRMSNorm(256, scales="given")(X, X), ModuleInputError,
        "scale has None, expected one float32 number",
    ),
    "two scales": (
        lambda: quantized.AddRMSNorm(256, scales="given")(X, X, torch.ones(2)), ModuleInputError,
        r"scale has shape \(2,\) of torch.float32, expected one float32 number",
    ),
    "a scale that is made": (
        lambda: quantized.AddRMSNorm(256)(X, X, GIVEN), ModuleInputError,
        'scale has a scale, expected none, .* each row.*: make the module with scales="given"',
    ),
    "a gradient": (
        lambda: quantized.AddRMSNorm(256)(X.clone().requires_grad_(), X), ModuleInputError,
        "x has a tensor that requires a gradient, .*no_grad",
    ),
    "a weight's gradient": (
        lambda: quantized.AddRMSNorm(256).requires_grad_()(X, X), ModuleInputError, "weight has a tensor that requires",
    ),
    "another hidden size": (
        lambda: quantized.AddRMSNorm(512)(X, X), ModuleInputError, r"x has shape \(3, 256\), expected 512 along",
    ),
    "another residual": (
        lambda: quantized.AddRMSNorm(256)(X, X[:1]), ModuleInputError, r"residual has shape \(1, 256\), expected \(3,",
    ),
    "integers": (lambda: quantized.AddRMSNorm(256)(X.long(), X), ModuleInputError, "x has dtype torch.int64"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str) -> None:
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


def test_bad_calls_of_ranks() -> None:
    """The same errors as of ``nn.AddRMSNorm``, on each rank that makes them."""

    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(list(range(size)))
        for kind in (quantized.AddRMSNorm, AddRMSNorm):
            module = kind(256, mesh=mesh, input=P, residual=S0, parameters="local").requires_grad_(False)
            with pytest.raises(ModuleInputError, match=r"residual has shape \(3, 256\), expected \(2, 256\), .* piece"):
                module(torch.ones(4, 256), torch.ones(3, 256))

    run_ranks(2, run)


def test_settings_are_followed_and_kept() -> None:
    module = quantized.AddRMSNorm(256, EPS)
    with torch.no_grad():
        assert module(X, X)[0].scales.shape == (3, 1)
        module.scales, module.values_dtype = "block", torch.float8_e5m2
        again = pickle.loads(pickle.dumps(module))
        for own in (module, again):
            values, scales = own(X, X)[0]
            assert (values.dtype, scales.shape) == (torch.float8_e5m2, (3, 2))
    with pytest.raises(ModuleArgumentError, match="scales="):
        module.scales = "column"  # pyright: ignore[reportAttributeAccessIssue]
    assert module.scales == "block"


def test_the_check_sees_a_rank_that_is_left_out() -> None:
    """A scale of the own columns alone, and a sum without the other's summand."""
    x = torch.randn(4, 256).double()
    found = quantized.quantize(x[:, :128].float())
    with pytest.raises(AssertionError):
        _check_quantized(_Half(), found, x, [S1], "row")


class _Half(Here):
    """The first of two ranks, with half of the columns."""

    def __init__(self) -> None:
        super().__init__(MESH, torch.device("cpu"))

    def cut(self, full: Tensor, placements: Placements) -> Tensor:
        return full[:, :128] if placements == [S1] else full
