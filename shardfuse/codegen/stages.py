"""Kernels that one launch does one after the other.

The first is the launch's own function, each later one a function of its blocks that programs call.  Between two stages
all programs meet, and take the blocks of the next in turn; or, where programs share kept elements, the last of them to
come goes on with these (``KernelPlan.shares``).  Who meets must be resident, which a cooperative launch sees to.  A
single program goes on once all of its threads have come.  The interpreter runs programs one after the other: there the
last one of all does what comes after a meeting.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.expr import BoundTensor
from ..kernel_functions import texts_of
from .source import BLOCK, MAILBOX, PROGRAM, Kernel
from .statements import Branch, Loop, Statement


def one_launch(
    name: str, tensors: tuple[BoundTensor, ...], stages: Sequence[Kernel], *, shares: int, interpret: bool
) -> Kernel:
    """``stages`` in order, as one kernel ``name`` of ``tensors``.

    ``shares``: how many programs share a block of kept elements, of whom the last goes on; 0 where all meet.
    """
    first, *later = stages
    assert not any(stage.scalars for stage in later), f"{name} has scalars behind its first stage"
    meets = not shares and first.grid > 1
    helpers = texts_of("is_last", interpret=interpret) if shares else {}
    helpers |= texts_of("meet_all", interpret=interpret) if meets and not interpret else {}
    integers, body = dict(first.integers), list[Statement](first.body)
    for k, stage in enumerate(later):
        helpers |= {**stage.helpers, stage.name: stage.function(BLOCK)}
        integers |= {f"{stage.name}_{key}": value for key, value in stage.integers.items()}
        each = first.x_block // stage.x_block if shares else 0
        if each != 1:
            integers[f"{stage.name}_blocks"] = stage.grid, "tl.int32"
        body += [""] if k else []
        meeting = _meeting(first.mailbox) if meets else "tl.debug_barrier()"
        body += [_as_last(stage, shares, each)] if shares else _by_all(stage, meeting, interpret=interpret)
    return Kernel(
        name, "".join(stage.comments for stage in stages), {**first.helpers, **helpers}, tensors, first.scalars,
        integers, body, first.grid, first.schedule, first.x_block,
        mailbox=first.grid // shares if shares else first.mailbox + meets, is_cooperative=meets,
        accesses=tuple(own for stage in stages for own in stage.accesses),
    )  # fmt: skip


def _as_last(stage: Kernel, shares: int, each: int) -> Branch:
    """``each`` blocks of ``stage`` make up the program's own block."""
    block = f"{PROGRAM} // {shares}"
    body: list[Statement] = [_called(stage, block)]
    if each != 1:
        stop = f"tl.minimum(at + {each}, {stage.name}_blocks)"
        body = [f"at = {block} * {each}", Loop(BLOCK, "at", stop, None, 1, [_called(stage, BLOCK)])]
    return Branch(f"is_last({MAILBOX} + {block}, {shares})", body)


def _meeting(mailbox: int) -> str:
    """``mailbox``: words that come before the count of those that met."""
    return f"meet_all({MAILBOX}{f' + {mailbox}' if mailbox else ''})"


def _by_all(stage: Kernel, meeting: str, *, interpret: bool) -> list[Statement]:
    """``meeting``: behind which what all have stored is there."""
    stop, called = f"{stage.name}_blocks", [_called(stage, BLOCK)]
    if interpret:
        return [Branch(f"{PROGRAM} == tl.num_programs(0) - 1", [Loop(BLOCK, "0", stop, "1", 1, called)])]
    return [meeting, Loop(BLOCK, PROGRAM, stop, "tl.num_programs(0)", 1, called)]


def _called(stage: Kernel, block: str) -> str:
    own = (f"{stage.name}_{key}" for key in stage.integers)
    return f"{stage.name}({', '.join([*stage.pointers, *own, block])})"
