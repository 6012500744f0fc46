"""NaN, infinities, overflow and signs of zero: a sharded axis gives what the unsharded fusion gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusion_check import bound_piece, local_piece
from ranks import run_ranks

from shardfuse import DataType, DeviceMesh, FusionDefinition

NAN, INF = float("nan"), float("inf")
ROWS = [
    [NAN, 1.0, 2.0, 3.0],
    [1.0, 2.0, 3.0, NAN],
    [INF, 1.0, 2.0, 3.0],
    [1.0, 2.0, 3.0, INF],
    [-INF, 0.0, 1.0, 2.0],
    [-INF, -INF, -INF, -INF],
    [INF, -INF, 1.0, 1.0],
    [NAN, INF, 1.0, 2.0],
    [3e38, 3e38, INF, 1.0],
    [-0.0, -0.0, -0.0, -0.0],
    [-0.0, 0.0, -0.0, 0.0],
    [0.0, 0.0, 0.0, -0.0],
    [1e-42, -1e-42, 1e-45, 0.0],
    # The sum overflows, in one shard or over all of them; the squares do; a difference to the mean does.
    [3e38, 3e38, 3e38, 1.0],
    [2e38, 2e38, 2e38, 2e38],
    [1e20, -1e20, 1e20, 1.0],
    [2e19, 0.0, 0.0, 0.0],
    [0.0, 0.0, 0.0, 2.5e19],
    [3.4e38, -3.4e38, -3.4e38, 1.0],
    [-3.4e38, 3.4e38, -3.4e38, 1.0],
    [1.0, 2.0, 3.0, 4.0],
]


def _softmax(o: Any, x: Any) -> Any:
    e = o.exp(o.sub(x, o.max(x, [1], keepdim=True)))
    return o.div(e, o.sum(e, [1], keepdim=True))


def _layer_norm(o: Any, x: Any) -> Any:
    var, mean = o.var_mean(x, [1], 0, True)
    return o.mul(o.sub(x, mean), o.rsqrt(o.add(var, 1e-5)))


PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    **{name: lambda o, x, name=name: [getattr(o, name)(x, [1])] for name in ("max", "min", "sum", "prod", "mean")},
    **{name: lambda o, x, name=name: [getattr(o, name)(x, [1])] for name in ("any", "all")},
    **{name: lambda o, x, name=name: [getattr(o, name)(x, 1)] for name in ("argmax", "argmin", "cummax", "cummin")},
    "var_mean": lambda o, x: list(o.var_mean(x, [1], 0, True)),
    "var": lambda o, x: [o.var(x, [1])],
    "welford": lambda o, x: list(o.welford(x, [1])),
    "softmax": lambda o, x: [_softmax(o, x)],
    "layer_norm": lambda o, x: [_layer_norm(o, x)],
    "rms_norm": lambda o, x: [o.mul(x, o.rsqrt(o.add(o.mean(o.mul(x, x), [1], keepdim=True), 1e-6)))],
    "norm": lambda o, x: [o.sqrt(o.sum(o.mul(x, x), [1]))],
}


def _define(name: str, dtype: DataType, mesh: DeviceMesh | None) -> FusionDefinition:
    """Unsharded where there is no mesh; else every mesh dimension cuts the reduced axis."""
    with FusionDefinition(backend="torch") as fd:
        x = fd.define_tensor([-1, 6], dtype=dtype)
        for out in PROGRAMS[name](fd.ops, x):
            fd.add_output(out)
        if mesh is not None:
            x.set_device_mesh(mesh)
            for k, parallel_type in enumerate(mesh.parallel_types):
                x.outer_split(1 + k, mesh.extent(parallel_type), uneven=True)
                x.axis(1 + k).parallelize(parallel_type)
    return fd


def _kinds(x: torch.Tensor) -> torch.Tensor:
    """0 NaN, 1 and -1 infinite, 2 and -2 zero, 3 and -3 anything else; integers as they are."""
    if not x.is_floating_point():
        return x
    sign = torch.where(torch.signbit(x), -1, 1)
    kind = torch.where(torch.isinf(x), 1, torch.where(x == 0, 2, 3))
    return torch.where(torch.isnan(x), 0, kind * sign)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", [[0, 1], [0, 1, 2], [2, 0, 3, 1], [[0, 1], [2, 3]]], ids=str)
def test_as_unsharded(ranks: list[Any], dtype: torch.dtype) -> None:
    mesh = DeviceMesh(ranks)
    rows = torch.tensor([[*row, row[1], row[2]] for row in ROWS], dtype=torch.float64)
    if dtype is torch.float64:  # the same exponents of its own range
        large = rows.isfinite() & (rows.abs() > 1e10)
        rows = torch.where(large, rows.sign() * rows.abs() ** 8, rows)
    x = rows.to(dtype)
    unsharded = {name: _define(name, DataType.from_torch(dtype), None).execute([x]) for name in PROGRAMS}
    assert not any(t.isnan().all() for found in unsharded.values() for t in found)

    def run(rank: int, _: int) -> None:
        for name, wanted in unsharded.items():
            fd = _define(name, DataType.from_torch(dtype), mesh)
            tv = fd.fusion.inputs[0].val
            found = fd.execute([local_piece(tv, x, rank)], sizes={tv: x.shape})
            plan = fd.fec.last_plan
            assert plan is not None
            for k, (out, mine, whole) in enumerate(zip(plan.fusion.outputs, found, wanted, strict=True)):
                want = bound_piece(out.domain, whole, rank)
                kinds = [
                    _kinds(t).abs() if name in ("max", "min") else _kinds(t) for t in (mine, want)
                ]  # zeros are equal
                bad = (kinds[0] != kinds[1]).nonzero().tolist()
                assert name not in ("max", "min") or torch.equal(mine.nan_to_num(nan=0.5), want.nan_to_num(nan=0.5))
                told = [(r[0], ROWS[r[0]], mine[tuple(r)].item(), want[tuple(r)].item()) for r in bad]
                assert not bad, f"output {k} of {name}: rows, their found and wanted values: {told}"

    run_ranks(mesh.size, run)
