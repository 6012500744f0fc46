"""Slices, pads, cats and flips in kernels under Triton's interpreter, alone and on two ranks, against torch."""

from __future__ import annotations

import pytest
import torch
from fusion_check import check
from interpreted import values
from thread_check import Case, X, check_on_threads, shard, world_mesh
from window_cases import OTHERS, ROTARY, WindowCase, half_rotated, norm, normed, rotate_half

from shardfuse import DataType, FusionDefinition

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, of what is computed where nothing is
]

ALL = [(case, dtype) for case in (*ROTARY, *OTHERS) for dtype in case.dtypes]


def defined(case: WindowCase, dtype: DataType) -> FusionDefinition:
    with FusionDefinition(backend="triton") as fd:
        inputs = [fd.define_tensor(list(shape), dtype=dtype) for shape in case.shapes]
        fd.add_output(case.define(fd.ops, *inputs))
    return fd


@pytest.mark.parametrize(("case", "dtype"), ALL, ids=[f"{c.name}, {d.name}" for c, d in ALL])
def test_like_torch(case: WindowCase, dtype: DataType) -> None:
    fd = defined(case, dtype)
    check(fd, [values(*shape, dtype=dtype, seed=k) for k, shape in enumerate(case.shapes)], reference=case.reference)
    explained = fd.explain()
    calls = [s for s in explained.segments if s.scheduler == "torch_call"]
    assert explained.kernels + len(calls) <= case.launches, explained


@pytest.mark.parametrize("axis", range(4))
def test_rotary_on_two_ranks(axis: int) -> None:
    """Batch, heads, 5 positions unevenly; and the axis that is rotated, which is gathered."""
    with FusionDefinition(backend="triton") as fd:
        inputs = [fd.define_tensor(shape) for shape in ([2, 4, 5, 16], [5, 16], [5, 16])]
        fd.add_output(rotate_half(fd.ops, *inputs))
        shard(inputs[0], world_mesh(2), (X, (axis, "outer")))
    data = [values(2, 4, 5, 16), values(5, 16, seed=1), values(5, 16, seed=2)]
    check_on_threads(2, [Case(fd, data, reference=half_rotated)])
    explained = fd.explain()
    assert (explained.kernels, [c.kind for c in explained.collectives]) == (
        (1, []) if axis < 3 else (2, ["all_gather"])
    )


@pytest.mark.parametrize("axis", range(2))
def test_pairs_of_an_axis_on_two_ranks(axis: int) -> None:
    """Rows; and the axis that holds the pairs, whose shards are whole pairs."""
    with FusionDefinition(backend="triton") as fd:
        x = fd.define_tensor([4, 16])
        pairs = fd.ops.reshape(x, [4, 8, 2])
        first, second = fd.ops.select(pairs, 0, 2), fd.ops.select(pairs, 1, 2)
        fd.add_output(fd.ops.sub(fd.ops.exp(first), second))
        shard(x, world_mesh(2), (X, (axis, "outer")))
    check_on_threads(2, [Case(fd, [values(4, 16)], reference=lambda x: x[:, ::2].exp() - x[:, 1::2])])


def test_any_layout_of_the_input() -> None:
    """Strides, an expanded input, and one that does not begin at an aligned address."""
    for x in (
        values(16, 5, 3, seed=1).permute(2, 1, 0),
        values(3, 5, 32)[..., ::2],
        values(3, 5, 1).expand(3, 5, 16),
        values(241)[1:].view(3, 5, 16),
    ):
        with FusionDefinition(backend="triton") as fd:
            inputs = [
                fd.define_tensor([3, 5, 16], contiguity=False),
                fd.define_tensor([5, 16]),
                fd.define_tensor([5, 16]),
            ]
            fd.add_output(rotate_half(fd.ops, *inputs))
        check(fd, [x, values(5, 16), values(5, 16, seed=2)], reference=half_rotated)


def test_an_expanded_axis_that_is_reduced() -> None:
    for x in (values(5, 1).expand(5, 12), values(1, 1).expand(5, 12)):
        with FusionDefinition(backend="triton") as fd:
            fd.add_output(
                norm(fd.ops, fd.ops.pad(fd.define_tensor([5, 12], contiguity=False), [3, 2]), fd.define_tensor([17]))
            )
        check(fd, [x, values(17)], reference=lambda x, w: normed(torch.nn.functional.pad(x, (3, 2)), w))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_single_elements_of_two_parts_of_one_axis(backend: str) -> None:
    with FusionDefinition(backend=backend) as fd:
        x = fd.define_tensor([12])
        parts = fd.ops.reshape(x, [2, 3, 2])
        fd.add_output(fd.ops.slice(parts, [1, 0, 1], [2, 3, 2]))
        fd.add_output(fd.ops.slice(fd.ops.neg(parts), [0, 2, 1], [1, 3, 2]))
    check(fd, [values(12)])


def test_a_window_that_is_stored_and_read() -> None:
    with FusionDefinition(backend="triton") as fd:
        x = fd.define_tensor([6, 4])
        wide = fd.ops.pad(x, [1, 2])
        turned = fd.ops.flip(x, [0])
        for out in (wide, fd.ops.relu(wide), turned, fd.ops.abs(turned)):
            fd.add_output(out)
    check(fd, [values(6, 4)])


def test_sums_of_rows_and_of_columns() -> None:
    with FusionDefinition(backend="triton") as fd:
        x, dy = fd.define_tensor([300, 112]), fd.define_tensor([300, 128])
        wide = fd.ops.pad(x, [8, 8])
        fd.add_output(fd.ops.sum(fd.ops.mul(dy, wide), [0]))
        fd.add_output(fd.ops.sub(dy, fd.ops.mul(wide, fd.ops.mean(fd.ops.mul(dy, wide), [1], keepdim=True))))
    check(fd, [values(300, 112), values(300, 128, seed=1)])
    assert [s.scheduler for s in fd.explain().segments] == ["mix_order"]


def test_bytes_of_windows() -> None:
    """Of an input that is read through windows alone, what they hold; of one that is read whole, all of it."""
    with FusionDefinition() as fd:
        x, y = fd.define_tensor([4, 100]), fd.define_tensor([4, 10])
        narrow = fd.ops.slice(x, [0, 5], [4, 10])
        fd.add_output(fd.ops.exp(fd.ops.cat([fd.ops.neg(narrow), y], 1)))
    assert (fd.explain().kernels, fd.explain().bytes) == (1, 4 * 4 * (5 + 10 + 15))
    assert rotary_bytes() == 4 * (480 + 80 + 80 + 480)


def rotary_bytes() -> int:
    with FusionDefinition() as fd:
        inputs = [fd.define_tensor(shape) for shape in ([2, 3, 5, 16], [5, 16], [5, 16])]
        fd.add_output(rotate_half(fd.ops, *inputs))
    return fd.explain().bytes


def test_a_part_of_an_input_is_a_view_of_it() -> None:
    with FusionDefinition(backend="triton") as fd:
        x = fd.define_tensor([6, 8])
        fd.add_output(fd.ops.slice(x, [1, 2], [5, 8]))
        fd.add_output(fd.ops.select(x, -1, 1))
    data = values(6, 8)
    found = fd.execute([data])
    assert torch.equal(found[0], data[1:5, 2:])
    assert torch.equal(found[1], data[:, -1])
    assert {t.untyped_storage().data_ptr() for t in found} == {data.untyped_storage().data_ptr()}
