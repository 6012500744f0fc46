"""nvFuser's module: what is refused, and in which words."""

from __future__ import annotations

import pytest
import torch

import shardfuse.compat.nvfuser_direct as nvfuser_direct
from shardfuse.compat.nvfuser_direct import DataType, FusionDefinition


@pytest.mark.parametrize(
    ("starts", "ends", "steps", "said"),
    [
        ([-1, -2], [5, 5], [7, 7], "start_indices must be greater than or equal to 0"),
        ([3, 4], [1, 2], [1, 1], "end_indices must be greater than or equal to start_indices"),
        ([0, 0], [5, 5], [5, 5], "strides must be of const size 1"),
        ([0, 0, 0], [4, 4, 4], [1, 1, 1], "Number of tensor dimensions does not match slice dimensions"),
        ([0, 0, 0], [4, 4], [1, 1], "start_indices and strides don't match"),
        ([0, 0], [4, 4, 4], [1, 1], "Slice indexing attribute dimensions don't match"),
        ([0, 0], [4, 4], [1, 1, 1], "start_indices and strides don't match"),
    ],
)
def test_a_bad_slice_is_refused_in_nvfusers_words(
    starts: list[int], ends: list[int], steps: list[int], said: str
) -> None:
    with nvfuser_direct.FusionDefinition() as fd:
        x = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=nvfuser_direct.DataType.Float)
        with pytest.raises(RuntimeError, match=said) as raised:
            fd.ops.slice(x, start_indices=starts, end_indices=ends, strides=steps)
        assert str(starts) in str(raised.value)
        assert str(ends) in str(raised.value)
        fd.add_output(fd.ops.slice(x, start_indices=[1, 0], end_indices=[3, 2]))
    given = torch.randn(4, 5)
    assert torch.equal(fd.execute([given])[0], given[1:3, :2])


def test_errors_name_the_input() -> None:
    with FusionDefinition() as fd:
        t, s = fd.define_tensor(shape=[-1]), fd.define_scalar()
        fd.add_output(fd.ops.mul(t, s))
    with pytest.raises(RuntimeError, match=r"Expected input 0, .*, to be an at::Tensor but got scalar 2"):
        fd.execute([2.0, 2.0])
    with pytest.raises(
        RuntimeError, match=r"Expected input 0, .*, to be of dtype torch.float32 but got dtype torch.float16"
    ):
        fd.execute([torch.ones(3).half(), 2.0])
    with FusionDefinition() as empty:
        pass
    with pytest.raises(NotImplementedError, match="Fusion is empty!"):
        empty.execute([torch.ones(3)])
    with pytest.raises(NotImplementedError, match="Fusion does not exist!"):
        FusionDefinition().execute([])


def test_what_is_not_there_says_so() -> None:
    with pytest.raises(AttributeError, match="4-bit floats are not supported"):
        DataType.Float4_e2m1fn  # noqa: B018
    with FusionDefinition() as fd:
        t = fd.define_tensor(shape=[-1, -1])
        with pytest.raises(RuntimeError, match="shardfuse schedules kernels by itself"):
            t.cache_after()
        with pytest.raises(AttributeError, match="did you mean"):
            fd.ops.rsqrtt(t)
