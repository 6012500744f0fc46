"""A whole tensor in place of a shard whose size nothing says: its size times the ranks fits no other operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks

from shardfuse import DeviceMesh, FusionDefinition, ParallelType
from shardfuse.errors import ShapeError

WORLD = 2
OPS: dict[str, tuple[Callable[..., Any], list[int]]] = {
    "add": (lambda o, x, y: o.add(x, y), [8]),
    "add behind another op": (lambda o, x, y: o.add(y, o.exp(x)), [8]),
    "matmul": (lambda o, x, y: o.matmul(x, y), [8, 5]),
    "linear": (lambda o, x, y: o.linear(x, y), [5, 8]),
    "cat": (lambda o, x, y: o.cat([x, y], 0), [3, 8]),
    "attention": (lambda o, x, y: o.sdpfa_fwd(x, y, y)[0], [5, 8]),
    "expand": (lambda o, x, y: o.add(o.expand(x, [3, 8]), y), [8]),
    "reshape": (lambda o, x, y: o.add(o.reshape(x, [24]), o.sum(y)), [8]),
}


def defined(op: str, shape: list[int] | None = None) -> FusionDefinition:
    """x [3, -1], sharded by columns, beside a tensor that all ranks have."""
    call, own = OPS[op]
    with FusionDefinition(backend="torch") as fd:
        x, y = fd.define_tensor([3, -1]), fd.define_tensor(shape or own)
        fd.add_output(call(fd.ops, x, y))
    for tv in (x, y):
        tv.set_device_mesh(DeviceMesh([*range(WORLD)]))
    x.outer_split(1, WORLD)
    x.axis(1).parallelize(ParallelType.mesh_x)
    return fd


@pytest.mark.parametrize("op", OPS)
def test_the_whole_of_a_sharded_axis(op: str) -> None:
    def run(*_: int) -> str:
        fd = defined(op)
        with pytest.raises(ShapeError) as error:
            fd.execute([torch.ones(3, 8), torch.ones(OPS[op][1])])
        assert len(fd.execute([torch.ones(3, 4), torch.ones(OPS[op][1])])) == 1, "shards are taken"
        return str(error.value)

    for message in run_ranks(WORLD, run):
        sentence, *lines = message.split("\n")
        assert sentence.endswith(
            "; axis 1 of T0 is sharded, and 8 elements of it were passed on each of 2 ranks: if that is the whole, "
            "pass this rank's shard of 4, else correct the sizes"
        ), sentence
        assert sentence.count(";") == 1, "one piece of advice"
        assert any("test_whole_arguments.py" in line for line in lines)


def test_sizes_that_are_said_or_do_not_fit_a_whole() -> None:
    """What the caller says is not guessed at; 16 beside 7 is no whole."""

    def run(*_: int) -> list[str]:
        said = defined("add", [-1])
        other = defined("add", [7])
        found: list[str] = []
        for fd, sizes, n in ((said, {said.fusion.inputs[0].val: [3, 16]}, 8), (other, None, 7)):
            with pytest.raises(ShapeError) as error:
                fd.execute([torch.ones(3, 8), torch.ones(n)], sizes=sizes)
            found.append(str(error.value))
        return found

    for message in (m for found in run_ranks(WORLD, run) for m in found):
        assert message.partition("\n")[0].endswith("; broadcast one of them, or correct the sizes")
