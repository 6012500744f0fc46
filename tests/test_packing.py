"""Small collectives of one step are one call."""

from __future__ import annotations

import pytest
import torch
from fusion_check import check
from ranks import run_ranks

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.executor import collective_calls
from shardfuse.ir.tensor_view import TensorView


def rows(tv: TensorView, mesh: DeviceMesh, *, uneven: bool = False) -> None:
    tv.set_device_mesh(mesh)
    tv.outer_split(0, mesh.size, uneven=uneven)
    tv.axis(0).parallelize(ParallelType.mesh_x)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_backward_of_a_norm(size: int, uneven: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """dw and db of row-sharded tensors: one all-reduce of both."""
    calls: list[int] = []
    original = collective_calls.all_reduce
    monkeypatch.setattr(
        collective_calls,
        "all_reduce",
        lambda x, op, team, **how: (calls.append(x.numel()), original(x, op, team, **how))[1],
    )

    def run(rank: int, n: int) -> list[str]:
        mesh = DeviceMesh(list(range(n)))
        with FusionDefinition() as fd:
            g, x = (fd.define_tensor([-1, 12], contiguity=True) for _ in range(2))
            mean = fd.ops.mean(x, [1], keepdim=True)
            fd.add_output(fd.ops.sum(fd.ops.mul(g, fd.ops.sub(x, mean)), [0]))
            fd.add_output(fd.ops.sum(g, [0]))
            rows(g, mesh, uneven=uneven)
            rows(x, mesh, uneven=uneven)
        height = 4 * n + uneven
        check(
            fd,
            [numbers(height, 12), numbers(height, 12, seed=1)],
            sizes={g: (height, 12), x: (height, 12)} if uneven else None,
        )
        explained = fd.explain()
        assert explained.collectives[0].bytes == 2 * 12 * 4
        return [c.kind for c in explained.collectives]

    assert run_ranks(size, run) == [["all_reduce"]] * size
    assert calls == [24] * size  # of 12 floats each, 48 bytes


def test_what_cannot_be_one_call() -> None:
    """Another op, another dtype, a result that the other needs, too many bytes."""

    def run(rank: int, n: int) -> list[int]:
        mesh = DeviceMesh(list(range(n)))

        def count(define, dtypes: tuple[DataType, DataType] = (DataType.Float, DataType.Float), width: int = 4) -> int:
            with FusionDefinition() as fd:
                x, y = (fd.define_tensor([-1, width], contiguity=True, dtype=t) for t in dtypes)
                for out in define(fd, x, y):
                    fd.add_output(out)
                rows(x, mesh)
                rows(y, mesh)
            a, b = numbers(2 * n, width), numbers(2 * n, width, seed=1)
            check(fd, [a.to(dtypes[0].torch), b.to(dtypes[1].torch)])
            return len(fd.explain().collectives)

        return [
            count(lambda fd, x, y: (fd.ops.sum(x, [0]), fd.ops.sum(y, [0]))),
            count(lambda fd, x, y: (fd.ops.sum(x, [0]), fd.ops.max(y, [0]))),
            count(lambda fd, x, y: (fd.ops.sum(x, [0]), fd.ops.sum(y, [0])), (DataType.Float, DataType.Double)),
            count(lambda fd, x, y: (fd.ops.sum(fd.ops.sub(y, fd.ops.sum(x, [0])), [0]),)),
            count(lambda fd, x, y: (fd.ops.sum(x, [0]), fd.ops.sum(y, [0])), width=2**20 + 1),
        ]

    assert run_ranks(2, run) == [[1, 2, 2, 2, 2]] * 2


def test_on_one_mesh_dimension_of_two() -> None:
    def run(rank: int, n: int) -> list[str]:
        mesh = DeviceMesh([[0, 1], [2, 3]])
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, -1], contiguity=True)
            for t in (x, fd.ops.mul(x, x), fd.ops.exp(x)):
                fd.add_output(fd.ops.sum(t, [0]))
            x.set_device_mesh(mesh)
            for axis, parallel_type in ((1, ParallelType.mesh_x), (0, ParallelType.mesh_y)):
                x.outer_split(axis, 2)
                x.axis(axis).parallelize(parallel_type)
        check(fd, [numbers(6, 8)])
        return [str(c) for c in fd.explain().collectives]

    assert run_ranks(4, run) == [["all_reduce over mesh_y of 2 ranks, 48 bytes"]] * 4
