"""``invariant="ranks"``: rows that a program holds side by side, packed rows, and exponentials on several ranks."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from fusion_check import local_arguments

import shardfuse
from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.device import H200
from shardfuse.mesh import current_rank
from shardfuse.schedulers import persistent
from shardfuse.schedulers.candidates import candidates
from shardfuse.schedulers.plan import KernelPlan

from .test_promises import by_pairs


def centred(n: int, dtype: DataType) -> FusionDefinition:
    """Rows less their sum, and that sum; of 16 bits, so that long rows are packed."""
    with FusionDefinition(backend="triton", invariant="ranks") as fd:
        x = fd.ops.cast(fd.define_tensor([-1, n], contiguity=True, dtype=dtype), dtype=DataType.Float)
        total = fd.ops.sum(x, [1], keepdim=True)
        fd.add_output(fd.ops.cast(fd.ops.sub(x, total), dtype=dtype))
        fd.add_output(total)
    return fd


def kernel_of(fd: FusionDefinition) -> KernelPlan:
    plan = fd.fec.last_plan
    assert plan is not None, "it has run"
    (kernel,) = [k for s in plan.segments for k in s.kernels]
    return kernel


def check(fd: FusionDefinition, x: torch.Tensor) -> None:
    rows, sums = fd.execute([x])
    wanted = by_pairs(x.float())[:, None]
    assert torch.equal(sums, wanted)
    assert torch.equal(rows, (x.float() - wanted).to(x.dtype))


def drawn(rows: int, n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    return (
        torch.randn(rows, n, generator=generator) * torch.exp(3 * torch.randn(rows, n, generator=generator))
    ).bfloat16()


@pytest.mark.parametrize(
    ("rows", "n", "kept"), [(600, 64, 4), (2117, 64, 16), (601, 96, 4), (531, 768, 4), (540, 136, 4)]
)
def test_rows_side_by_side_have_the_bits_of_one(rows: int, n: int, kept: int) -> None:
    fd, x = centred(n, DataType.BFloat16), drawn(rows, n)
    check(fd, x)
    assert kernel_of(fd).schedule.kept == kept
    check(fd, x[:3].contiguous())
    assert kernel_of(fd).schedule.kept == 1


@pytest.mark.parametrize("n", [12288, 16384])
def test_packed_rows_of_two_chunks_are_one_tree(n: int) -> None:
    fd = centred(n, DataType.BFloat16)
    check(fd, drawn(3, n))
    schedule = kernel_of(fd).schedule
    assert schedule.is_packed, schedule
    assert schedule.launch.warps == 8, "as many as without a promise"


@pytest.mark.parametrize(("rows", "n"), [(280, 96), (2, 12288)])
def test_what_the_tuner_tries_has_the_same_bits(rows: int, n: int) -> None:
    x, fd = drawn(rows, n), centred(n, DataType.BFloat16)
    check(fd, x)
    first = kernel_of(fd)
    tried = [s for s in candidates("persistent", first.segment, first.schedule, H200) if s != first.schedule]
    assert tried
    for schedule in tried:
        with mock.patch.object(persistent, "ways", return_value=iter([schedule])):
            other = centred(n, DataType.BFloat16)
            check(other, x)
        assert kernel_of(other).schedule == schedule


def flat(ranks: int) -> FusionDefinition:
    """The result is sharded along an axis that only on several ranks is another one than the exponential's two."""
    with FusionDefinition(backend="triton", invariant="ranks") as fd:
        x = fd.define_tensor([3, 4096], contiguity=True)
        row = fd.ops.reshape(fd.ops.exp(x), [3 * 4096])
        found = fd.ops.cast(row, dtype=DataType.BFloat16)
        fd.add_output(found)
        for t in (row, found) if ranks > 1 else ():
            t.set_device_mesh(DeviceMesh(range(ranks)))
            t.outer_split(0, ranks)
            t.axis(0).parallelize(ParallelType.mesh_x)
    return fd


def scaled(ranks: int) -> FusionDefinition:
    """By the exponential of a number, which is in a kernel of its own where ranks add it up."""
    with FusionDefinition(backend="triton", invariant="ranks") as fd:
        x = fd.define_tensor([-1, 4096], contiguity=True)
        number = fd.ops.exp(fd.ops.mul(fd.ops.sum(fd.ops.mul(x, x), [0, 1]), -1.3e-3))
        fd.add_output(fd.ops.cast(fd.ops.mul(fd.ops.add(x, 0.3), number), dtype=DataType.BFloat16))
        if ranks > 1:
            x.set_device_mesh(DeviceMesh(range(ranks)))
            x.outer_split(0, ranks)
            x.axis(0).parallelize(ParallelType.mesh_x)
    return fd


DEFINED = {"flat": flat, "scaled": scaled}


def ran(name: str, x: torch.Tensor) -> torch.Tensor:
    fd = DEFINED[name](shardfuse.initialize().world_size)
    return fd.execute([x] if name == "flat" else local_arguments(fd.fusion, [x], current_rank()))[0]


@pytest.mark.parametrize("name", DEFINED)
def test_ranks_take_the_same_exponential(name: str) -> None:
    """The rough one is off by enough to show in some of so many 16-bit results."""
    rows = 3 if name == "flat" else 8
    x = torch.rand(rows, 4096, generator=torch.Generator().manual_seed(0))
    x = -(x * 60 + 20) if name == "flat" else x
    (one,) = shardfuse.simulate(ran, 1, args=(name, x))
    for size in (2, 4):
        assert torch.equal(torch.cat(shardfuse.simulate(ran, size, args=(name, x))), one), size
