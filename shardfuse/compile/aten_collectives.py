# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Functional collectives of a graph (``_c10d_functional``) as records of a local definition.

A definition of a region says what one rank does with its own tensors.  Collectives stand in it as ops of their own,
printed like any other, which no plan knows: ``rank_axis`` makes of all of it a fusion over a mesh::

    T2 = fd.ops.all_reduce_sum(T0)                # of the shape of T0
    T3 = fd.ops.reduce_scatter_sum(T0, ranks=2)   # of 2 ranks: rows 0 to n/2, or n/2 to n, of the sum
    T4 = fd.ops.all_gather(T0, ranks=2)           # the rows of both ranks, one below the other
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Node

from ..frontend.definition import FusionDefinition
from ..ir.base_op import BaseOp
from ..ir.tensor_view import TensorView
from .compile_errors import UntranslatableError
from .translation import Rule, Translation, known

REDUCING = {"sum": "all_reduce_sum", "max": "all_reduce_max", "min": "all_reduce_min"}
SCATTERING, GATHERING = "reduce_scatter_sum", "all_gather"


@dataclass(frozen=True)
class Collective(BaseOp):
    """Of a local definition; ``ranks``: how many, where the rows of its result are more or fewer."""

    name: str
    ranks: int | None = None


RECORDED = frozenset({*REDUCING.values(), SCATTERING, GATHERING})
"""Names of collectives in a local definition."""
NAMESPACE = "_c10d_functional"


@functools.cache
def collective_ops() -> tuple[object, object, object, object] | None:
    """All-reduce, reduce-scatter, all-gather and the wait for each; None in a torch without torch.distributed."""
    if not torch.distributed.is_available():
        return None
    ops: Any = torch.ops._c10d_functional
    started = ops.all_reduce, ops.reduce_scatter_tensor, ops.all_gather_into_tensor
    return *(op.default for op in started), ops.wait_tensor.default


def is_start(node: Node) -> bool:
    """Does it start a collective that a region may hold?"""
    ops = collective_ops()
    return ops is not None and node.op == "call_function" and node.target in ops[:3]


def is_wait(node: Node) -> bool:
    ops = collective_ops()
    return ops is not None and node.op == "call_function" and node.target is ops[3]


def is_gather(node: Node) -> bool:
    ops = collective_ops()
    return ops is not None and node.op == "call_function" and node.target is ops[2]


def is_scatter(node: Node) -> bool:
    """Does it start a reduce-scatter?"""
    ops = collective_ops()
    return ops is not None and node.op == "call_function" and node.target is ops[1]


def group_of(node: Node) -> str:
    """The name of the process group of a start.  Raises ``UntranslatableError``."""
    name = node.args[-1]
    if not isinstance(name, str):
        raise UntranslatableError("a process group", name, "the name of one")
    return name


def collective_table() -> dict[object, Rule]:
    ops = collective_ops()
    if ops is None:
        return {}
    return {ops[0]: _all_reduce, ops[1]: _reduce_scatter, ops[2]: _all_gather, ops[3]: _wait}


def record_collective(fd: FusionDefinition, name: str, x: TensorView, ranks: int | None = None) -> TensorView:
    """A collective named ``name`` of ``x`` in a local definition.  ``ranks``: how many, where its rows change.

    Raises ``UntranslatableError``.
    """
    shape = list(x.shape)
    if ranks is not None:
        if not shape:
            raise UntranslatableError(f"what {name} is of", "a tensor without dims", "one with rows")
        rows = shape[0]
        shape[0] = -1 if rows < 0 else rows * ranks if name == GATHERING else rows // ranks
    out = fd.fusion.new_tensor(shape, x.dtype)
    fd.fusion.record(cast("Any", Collective(name, ranks)), [x], out)
    return out


def _all_reduce(t: Translation, node: Node) -> TensorView:
    x, reduce_op, _ = node.args
    name = REDUCING.get(str(reduce_op))
    if name is None:
        raise UntranslatableError("an all-reduce", reduce_op, "sum, max or min")
    t.within(group_of(node))
    return record_collective(t.fd, name, t.tensor(x))


def _reduce_scatter(t: Translation, node: Node) -> TensorView:
    x, reduce_op, ranks, _ = node.args
    if reduce_op != "sum":
        raise UntranslatableError("a reduce-scatter", reduce_op, "a sum")
    t.within(group_of(node))
    return record_collective(t.fd, SCATTERING, t.tensor(x), cast(int, ranks))


def _all_gather(t: Translation, node: Node) -> TensorView:
    x, ranks, _ = node.args
    t.within(group_of(node))
    return record_collective(t.fd, GATHERING, t.tensor(x), cast(int, ranks))


def _wait(t: Translation, node: Node) -> TensorView:
    """A region waits within its kernels' stream, where it reads what came."""
    return t.tensor(node.args[0])


def collective_text(node: Node) -> str:
    """``all_reduce(sum) of bfloat16 [8, 1024] over group '0'``."""
    name = str(node.target).split(".")[-2]
    reduce_op = [a for a in node.args if isinstance(a, str)][:-1]
    value = cast("Node", node.args[0]).meta["val"]
    shape = [n if known(n) >= 0 else str(n) for n in cast("Sequence[int | torch.SymInt]", value.shape)]
    dtype = str(value.dtype).removeprefix("torch.")
    of = f"{name}({reduce_op[0]})" if reduce_op else name
    return f"{of} of {dtype} [{', '.join(map(str, shape))}] over group {node.args[-1]!r}"
