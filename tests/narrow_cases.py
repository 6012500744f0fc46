"""Statistics of 16-bit floats whose sums, means and squares leave the type, or its digits, before the result is back.

Each element of each result is held to one rounding of its type, of what float64 gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from fusion_check import bound_piece, local_piece

import shardfuse
from shardfuse import DeviceMesh, FusionDefinition, ParallelType
from shardfuse.executor.options import Backend

NARROW = (torch.float16, torch.bfloat16)
SHARE = 0.5 + 2**-6
"""Of the distance of two neighbours: a rounding to the nearest, and what float32 left over before it."""


def _numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


VALUES: dict[str, torch.Tensor] = {
    "sum beyond half": torch.full((4, 101), 1000.0, dtype=torch.float64),
    "large mean": _numbers(4, 333) * 12 + 3000,
    "negative mean": _numbers(4, 257, seed=1) * 3 - 700,
    "squares beyond half": _numbers(4, 100, seed=2) * 2000,
    "squares below half": _numbers(4, 100, seed=3) * 1e-4,
    "many": _numbers(4, 5000, seed=4) + 40,
}
"""Rows to be reduced.  Squares of the last but one are below half's smallest number, their mean is a denormal."""

Build = Callable[[Any, Any, list[int]], Any]
Reference = Callable[[torch.Tensor, list[int]], Any]


def _reference_welford(x: torch.Tensor, axes: list[int]) -> list[torch.Tensor]:
    mean = x.mean(axes)
    count = torch.Size(x.shape[k] for k in axes).numel()
    return [mean, x.var(axes, correction=0) * count, torch.full(mean.shape, count)]


def _in_keepdim(ops: Any, x: Any, axes: list[int]) -> Any:
    """What a norm takes: both statistics with the axes kept."""
    return ops.var_mean(x, axes, 0, keepdim=True)


STATISTICS: dict[str, tuple[Build, Reference]] = {
    "mean": (lambda ops, x, axes: ops.mean(x, axes), lambda x, axes: x.mean(axes)),
    "sum": (lambda ops, x, axes: ops.sum(x, axes), lambda x, axes: x.sum(axes)),
    "var": (lambda ops, x, axes: ops.var(x, axes), lambda x, axes: x.var(axes)),
    "var_mean": (_in_keepdim, lambda x, axes: list(torch.var_mean(x, axes, correction=0, keepdim=True))),
    "welford": (lambda ops, x, axes: ops.welford(x, axes), _reference_welford),
}


def run_statistic(
    name: str, values: str, dtype: torch.dtype, backend: Backend, *, cut: Sequence[tuple[int, int]] = (),
    device: str = "cpu",
) -> None:  # fmt: skip
    """One statistic over the rows of ``values``, unsharded, and for each (dim, ranks) of ``cut`` on so many ranks."""
    build, reference = STATISTICS[name]
    x = VALUES[values].to(dtype).to(device)
    expected = reference(x.double(), [1])
    wanted = list(expected) if isinstance(expected, list) else [expected]
    what = f"{name} of {values} in {dtype}"
    for k, (found, want) in enumerate(zip(_define(build, x, backend).execute([x]), wanted, strict=True)):
        # Where kernels merge parts of a row, the mean is off by a rounding of float32: by its square a variance.
        left = (x.double().abs().amax().nan_to_num(0, 0, 0) * 2**-22).square() * 2**20 if device == "cuda" else 0.0
        assert_rounded_once(f"{what}, output {k}", found.cpu(), want.cpu(), left)
    for dim, ranks in cut:
        shardfuse.simulate(_on_a_rank(what, build, x, wanted, backend, dim, ranks), ranks)


def _on_a_rank(
    what: str, build: Build, x: torch.Tensor, wanted: Sequence[torch.Tensor], backend: Backend, dim: int, ranks: int
) -> Callable[[], None]:
    def run() -> None:
        rank = shardfuse.initialize().rank
        fd = _define(build, x, backend)
        tv = fd.fusion.inputs[0].val
        tv.set_device_mesh(DeviceMesh(list(range(ranks))))
        tv.outer_split(dim, ranks, uneven=True)
        tv.axis(dim).parallelize(ParallelType.mesh_x)
        found = fd.execute([local_piece(tv, x, rank)], sizes={tv: tuple(x.shape)})
        plan = fd.fec.last_plan
        assert plan is not None
        for k, (t, piece, want) in enumerate(zip(plan.fusion.outputs, found, wanted, strict=True)):
            own = bound_piece(t.domain, want, rank)
            assert own is not None
            assert_rounded_once(f"{what}, output {k}, dim {dim} over {ranks} ranks, rank {rank}", piece, own)

    return run


def _define(build: Build, x: torch.Tensor, backend: Backend) -> FusionDefinition:
    with FusionDefinition(backend=backend) as fd:
        found = build(fd.ops, fd.from_pytorch(x), [1])
        for out in found if isinstance(found, tuple) else (found,):
            fd.add_output(out)
    return fd


def assert_rounded_once(what: str, found: torch.Tensor, wide: torch.Tensor, terms: torch.Tensor | float = 0.0) -> None:
    """Each float within one rounding of its type of ``wide`` (float64), beyond the type infinite; integers equal.

    terms: the size of what was added up in float32, whose roundings are left where it cancels.
    """
    assert found.shape == wide.shape, f"{what}: {list(found.shape)}, expected {list(wide.shape)}"
    if not found.dtype.is_floating_point:
        assert torch.equal(found, wide.to(found.dtype)), what
        return
    info = torch.finfo(found.dtype)
    exponent = torch.floor(torch.log2(wide.abs().clamp(min=info.smallest_normal)))
    neighbours = torch.exp2(exponent) * info.eps
    rounded = wide.to(found.dtype)
    left = torch.as_tensor(terms).abs().cpu() * 2**-20
    bad = ~((found.double() - wide).abs() <= SHARE * neighbours + left) & (found != rounded)
    bad &= ~(torch.isnan(found) & torch.isnan(wide))
    assert not bad.any(), f"{what}: {found[bad][0].item()}, float64 has {wide[bad][0].item()}"
