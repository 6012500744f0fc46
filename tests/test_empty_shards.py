"""Ranks that hold nothing of what is reduced add nothing; what looks like a mean, or like one length, and is not."""

from __future__ import annotations

import pytest
import torch
from fusion_check import check
from ranks import run_ranks

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType

X, Y = ParallelType.mesh_x, ParallelType.mesh_y


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("extent", [1, 2, 5, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_reductions_have_their_identity(extent: int, sign: int, dtype: torch.dtype) -> None:
    """No 0 in a product or beside numbers of one sign, no largest or smallest number of the type in a sum."""
    x = sign * (torch.randperm(3 * extent, generator=torch.Generator().manual_seed(extent)) + 2).reshape(3, extent)
    x = x.to(dtype)

    def reference(x: torch.Tensor) -> list[torch.Tensor]:
        found = [x.sum(1), x.prod(1), x.amax(1), x.amin(1), (x > 0).any(1), (x > 0).all(1), x.argmax(1), x.argmin(1)]
        return [*found, x.double().mean(1)]

    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh([[3, 0], [1, 2]]) if size == 4 else DeviceMesh(torch.arange(size))
        with FusionDefinition(backend="torch") as fd:
            o, t = fd.ops, fd.define_tensor([3, extent], dtype=DataType.from_torch(dtype))
            outs = [getattr(o, name)(t, [1]) for name in ("sum", "prod", "max", "min")]
            outs += [getattr(o, name)(o.gt(t, 0), [1]) for name in ("any", "all")]
            outs += [o.argmax(t, 1), o.argmin(t, 1), o.mean(t, [1])]
            for out in outs:
                fd.add_output(out)
            t.set_device_mesh(mesh)
            for k, parallel_type in enumerate(mesh.parallel_types):
                t.outer_split(1 + k, mesh.extent(parallel_type), uneven=True)
                t.axis(1 + k).parallelize(parallel_type)
        check(fd, [x], reference=reference)

    for size in (3, 4):
        run_ranks(size, run)


@pytest.mark.parametrize("op", ["max", "min", "amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu])
def test_an_extreme_of_narrow_floats_has_its_identity(dtype: torch.dtype, op: str) -> None:
    """Of a type without infinities it is the last of its numbers, also beside that number itself, and beside NaN."""
    limits = torch.finfo(dtype)
    x = torch.tensor([[1.0, limits.max, limits.min, torch.nan, 2.0]]).to(dtype)

    def run(rank: int, size: int) -> torch.Tensor:
        with FusionDefinition(backend="torch") as fd:
            t = fd.define_tensor([1, 5], dtype=DataType.from_torch(dtype))
            fd.add_output(getattr(fd.ops, op)(t, [0]))
            t.set_device_mesh(DeviceMesh(range(size)))
            t.outer_split(0, size, uneven=True)
            t.axis(0).parallelize(X)
        return fd.execute([x[rank:]])[0]

    for found in run_ranks(2, run):
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), x[0].float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("extent", [2, 3, 5, 17])
def test_variance_on_a_mesh_of_four_by_four(extent: int) -> None:
    """A rank beyond the end has 0 elements, not fewer: 5 are 2, 2, 1 and none, which the next dimension cuts again."""
    x = torch.randn(3, extent, generator=torch.Generator().manual_seed(0)) + 10

    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(torch.arange(16).reshape(4, 4))
        for first, second in ((Y, X), (X, Y)):
            with FusionDefinition(backend="torch") as fd:
                t = fd.define_tensor([3, extent])
                for out in fd.ops.var_mean(t, [1], 0):
                    fd.add_output(out)
                t.set_device_mesh(mesh)
                for k, parallel_type in enumerate((first, second)):
                    t.outer_split(1 + k, 4, uneven=True)
                    t.axis(1 + k).parallelize(parallel_type)
            check(fd, [x], reference=lambda x: torch.var_mean(x, 1, correction=0))
            assert [c.kind for c in fd.explain().collectives] == ["all_gather"]

    run_ranks(16, run)


def test_variance_over_two_axes_that_both_have_empty_shards() -> None:
    """A rank beyond the end of both has 0 elements, not the product of two negative numbers."""
    x = torch.randn(5, 5, 3, generator=torch.Generator().manual_seed(0)) + 10

    def run(rank: int, size: int) -> None:
        with FusionDefinition(backend="torch") as fd:
            t = fd.define_tensor([5, 5, 3])
            for out in fd.ops.var_mean(t, [0, 1], 0):
                fd.add_output(out)
            t.set_device_mesh(DeviceMesh(torch.arange(16).reshape(4, 4)))
            for at, parallel_type in ((1, X), (0, Y)):
                t.outer_split(at, 4, uneven=True)
                t.axis(at).parallelize(parallel_type)
        check(fd, [x], reference=lambda x: torch.var_mean(x, (0, 1), correction=0))
        assert [c.kind for c in fd.explain().collectives] == ["all_gather"]

    run_ranks(16, run)


@pytest.mark.parametrize("divisor", [7, 9.0, 16])
def test_a_sum_divided_by_another_number_is_no_mean(divisor: float) -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)) + 2

    def run(rank: int, size: int) -> None:
        with FusionDefinition(backend="torch") as fd:
            o, t = fd.ops, fd.define_tensor([3, 8])
            centre = o.div(o.sum(t, [1], keepdim=True), divisor)
            off = o.sub(t, centre)
            fd.add_output(o.sum(o.mul(off, off), [1]))
            fd.add_output(centre)
            t.set_device_mesh(DeviceMesh(torch.arange(size)))
            t.outer_split(1, size)
            t.axis(1).parallelize(X)

        def reference(x: torch.Tensor) -> list[torch.Tensor]:
            centre = x.sum(1, keepdim=True) / divisor
            return [(x - centre).square().sum(1), centre]

        check(fd, [x], reference=reference)

    run_ranks(4, run)


def test_one_element_expanded_to_two_lengths_joins_none() -> None:
    """Of the lengths 5 and 7, which no static size tells, neither is the other's."""
    one, a, b = torch.tensor([3.0]), torch.arange(5.0), torch.arange(7.0)

    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(torch.arange(size))
        with FusionDefinition(backend="torch") as fd:
            o, t = fd.ops, fd.define_tensor([1])
            x, y = fd.define_tensor([-1]), fd.define_tensor([-1])
            fd.add_output(o.add(x, o.expand(t, [o.size(x, 0)])))
            fd.add_output(o.add(y, o.expand(t, [o.size(y, 0)])))
            for tv in (t, y):
                tv.set_device_mesh(mesh)
            x.set_device_mesh(mesh)
            x.outer_split(0, size, uneven=True)
            x.axis(0).parallelize(X)
        check(fd, [one, a, b], reference=lambda t, x, y: [x + t, y + t])

    run_ranks(2, run)


@pytest.mark.parametrize(("rows", "columns"), [(2, 3), (3, 2), (4, 2)])
def test_parts_that_two_mesh_dimensions_share(rows: int, columns: int) -> None:
    """A split of the parts of an uneven split leaves each part where it is, in inputs and in outputs.

    7 rows in 6 parts are 2, 2, 2, 1, 0 and 0, also where 2 x 3 ranks hold them.
    """
    parts = rows * columns

    def run(rank: int, size: int) -> None:
        for extent in (4, 5, 7, 9, 11, 12, 13):
            full = torch.arange(float(2 * extent)).reshape(extent, 2)
            for declared in (extent, -1):
                with FusionDefinition() as fd:
                    x = fd.define_tensor([declared, 2])
                    y = fd.ops.neg(x)
                    z = fd.ops.neg(fd.ops.cumsum(y, 0))
                    for out in (y, z):
                        fd.add_output(out)
                for t, is_cut in ((x, extent % 2 == 0), (y, True), (z, extent % 2 == 1)):
                    t.set_device_mesh(DeviceMesh(torch.arange(parts).reshape(rows, columns)))
                    if is_cut:
                        t.outer_split(0, parts, uneven=True).outer_split(0, rows)
                        t.axis(0).parallelize(Y)
                        t.axis(1).parallelize(X)
                length = -(-extent // parts)
                own = slice(rank * length, (rank + 1) * length)
                if -(-extent // length) <= columns:
                    continue  # the second row of ranks has nothing: refused
                given = full[own] if extent % 2 == 0 else full
                found = fd.execute([given], sizes={x: full.shape})
                assert torch.equal(found[0], -full[own])
                assert torch.equal(found[1], full.cumsum(0)[own] if extent % 2 else full.cumsum(0))

    run_ranks(parts, run)
