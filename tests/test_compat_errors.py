"""nvFuser's module: what is refused, and in which words."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfuse
import shardfuse.compat.nvfuser_direct as nvfuser_direct
from shardfuse.compat.nvfuser_direct import DataType, FusionDefinition
from shardfuse.errors import ShardfuseError, UnknownOpError


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


def negated() -> FusionDefinition:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.neg(fd.define_tensor(shape=[-1])))
    return fd


def executor(fd: FusionDefinition) -> nvfuser_direct.FusionExecutorCache:
    fd.execute([torch.ones(3)])
    return fd.fec


GIVEN: dict[str, Callable[[FusionDefinition, Any], object]] = {
    "execute": lambda fd, given: fd.execute(given),
    "execute, saved": lambda fd, given: fd.execute(given, save_repro_inputs=True),
    "validate": lambda fd, given: fd.validate(given),
    "manual_execute": lambda fd, given: fd.manual_execute(given),
    "manual_validate": lambda fd, given: fd.manual_validate(given),
    "repro_script_for": lambda fd, given: fd.repro_script_for(given),
    "execute of the executor": lambda fd, given: executor(fd).execute(given),
    "is_compiled of the executor": lambda fd, given: executor(fd).is_compiled(given),
    "get_scheduled_ir of the executor": lambda fd, given: executor(fd).get_scheduled_ir(given),
}


@pytest.mark.parametrize(
    "given", [torch.ones(3), torch.ones(1), torch.ones(3).numpy(), 3, "x", {"x": torch.ones(3)}], ids=repr
)
@pytest.mark.parametrize("call", GIVEN)
def test_inputs_are_a_list(call: str, given: object) -> None:
    """A tensor's rows were taken for arguments: of one row, the fusion ran on it."""
    method, fd = call.split()[0].rstrip(","), negated()
    with pytest.raises(RuntimeError, match=f"^{method}: found inputs .*, expected a list with an argument") as error:
        GIVEN[call](fd, given)
    assert isinstance(error.value, ShardfuseError)
    assert not getattr(error.value, "__notes__", [])


def test_what_else_lists_inputs_is_taken() -> None:
    x = torch.ones(3)
    for given in ([x], (x,), iter([x]), (t for t in [x]), {"x": x}.values()):
        assert torch.equal(negated().execute(given)[0], -x)
    with pytest.raises(RuntimeError, match="the fusion was given 2 inputs, it declares 1"):
        negated().validate([x, x])


def sum_of_sharded_rows() -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor(shape=[-1, 4], contiguity=True)
        fd.add_output(fd.ops.sum(x, [0]))
        x.set_device_mesh(nvfuser_direct.multidevice.DeviceMesh([0, 1]))
        x.outer_split(0, 2)
        x.axis(0).parallelize(nvfuser_direct.ParallelType.mesh_x)
    return fd


def test_one_rank_alone_that_passes_a_tensor() -> None:
    """It is reported to the others, which end at once."""

    def main() -> str:
        fd = sum_of_sharded_rows()
        given: Any = torch.ones(4, 4)
        with pytest.raises(RuntimeError) as error:
            fd.execute(given if torch.distributed.get_rank() == 0 else [given])
        return str(error.value)

    own, other = shardfuse.simulate(main, world_size=2)
    assert own.startswith("execute: found inputs a Tensor of shape [4, 4], expected a list")
    assert other.startswith(f"rank 0 failed: {own}")


def test_advice_that_holds_here_too() -> None:
    """``execute`` has no ``sizes=`` here: the shape in the definition says an unsharded size."""

    def main() -> str:
        fd = sum_of_sharded_rows()
        with pytest.raises(RuntimeError) as error:
            fd.execute([torch.ones(4 + torch.distributed.get_rank(), 4)])
        return str(error.value)

    for message in shardfuse.simulate(main, world_size=2):
        assert "the ranks do not run the same program" in message
        assert "by the shape in define_tensor(), sizes= of shardfuse.FusionDefinition.execute()" in message


def test_an_op_that_is_not_there() -> None:
    """A RuntimeError, as all of shardfuse's here, and an AttributeError, as of every name that is not there."""
    with FusionDefinition() as fd:
        x = fd.define_tensor(shape=[-1, -1])
        for call in (lambda: fd.ops.softmax(x, 1), lambda: nvfuser_direct.ops.softmax(x, 1)):
            for kind in (RuntimeError, AttributeError, UnknownOpError):
                with pytest.raises(kind, match=r"fd\.ops has no op 'softmax'"):
                    call()
        assert not hasattr(fd.ops, "softmax")


def test_a_vector_is_validated() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor(shape=[-1, -1], contiguity=True)
        fd.add_output(fd.ops.reshape(x, fd.define_vector(2)))
    given = torch.arange(24.0).view(4, 6)
    for references in ([given.view(3, 8)], None):
        (found,) = fd.validate([given, [3, 8]], references)
        assert torch.equal(found, given.view(3, 8))


@pytest.mark.parametrize("has_references", [False, True])
def test_ranks_hear_of_an_input_that_is_not_validated(has_references: bool) -> None:
    def main() -> tuple[str, float]:
        rank = torch.distributed.get_rank()
        with FusionDefinition() as fd:
            x, factor = fd.define_tensor(shape=[2, -1], contiguity=True), fd.define_scalar(None, DataType.Double)
            fd.add_output(fd.ops.sum(fd.ops.mul(x, factor), [0]))
            x.set_device_mesh(nvfuser_direct.multidevice.DeviceMesh([0, 1]))
            x.axis(0).parallelize(nvfuser_direct.ParallelType.mesh_x)
        given = [torch.ones(1, 4), torch.tensor(2.0) if rank else 2.0]
        references = [torch.full((4,), 4.0)] if has_references else [torch.ones(4)]
        started = time.monotonic()
        with pytest.raises(RuntimeError) as error:
            fd.validate(given, references)
        return str(error.value), time.monotonic() - started

    for rank, (message, seconds) in enumerate(shardfuse.simulate(main, world_size=2)):
        assert "Expected input 1, S0" in message
        assert message.startswith("rank 1 failed") == (rank == 0)
        assert seconds < 10
