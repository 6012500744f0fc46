"""Kernels that one launch does one after the other.

The first is the launch's own function, each later one a function of its blocks that programs call.  Between two stages
all programs meet, and take the blocks of the next in turn; or, where programs share kept elements, the last of them to
come goes on with these (``KernelPlan.shares``).  Who meets must be resident, which a cooperative launch sees to.  The
interpreter runs programs one after the other: there the last one of all does what comes after a meeting.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.expr import BoundTensor
from ..kernel_functions import texts_of
from .group_exchange import MAILBOX
from .loads import EVICT_FIRST, EVICT_LAST, L2_ONLY
from .source import KernelSource, Parts, Writer, body_text, signature


def one_launch(
    name: str, tensors: Sequence[BoundTensor], parts: Sequence[Parts], *, shares: int, interpret: bool
) -> KernelSource:
    """``parts`` in order, as one kernel ``name`` of ``tensors``.

    ``shares``: how many programs share a block of kept elements, of whom the last goes on; 0 where all meet.
    """
    first, *later = parts
    assert not any(p.scalars for p in later), f"{name} has scalars behind its first stage"
    helpers = {} if interpret and not shares else texts_of("is_last" if shares else "meet_all", interpret=interpret)
    integers = dict(first.integers)
    out = Writer()
    for p in later:
        helpers |= p.helpers
        helpers[p.name] = _function(p)
        own = {f"{p.name}_{key}": value for key, value in p.integers.items()}
        integers |= own
        each = first.x_block // p.x_block if shares else 0
        if each != 1:
            integers[f"{p.name}_blocks"] = p.grid, "tl.int32"
        out.paragraph()
        if shares:
            _call_as_last(out, p, list(own), shares, each)
        else:
            _call(out, p, list(own), first.mailbox, interpret=interpret)
    parameters = [
        MAILBOX,
        *(f"{t}_ptr" for t in tensors),
        *(p for p in first.parameters if p.split(":")[0] in {s.name for s in first.scalars}),
        *(f"{key}: {kind}" for key, (_, kind) in integers.items()),
    ]
    not_specialised = [*(s.name for s in first.scalars if not s.dtype.is_floating), *integers]
    comments = "".join(p.comments for p in parts)
    text = body_text(comments, {**first.helpers, **helpers}) + signature(name, parameters, not_specialised)
    return KernelSource(
        name, text + "\n".join([*first.lines, *out.lines]) + "\n", tuple(tensors), first.scalars,
        tuple(v for v, _ in integers.values()), first.grid, first.num_warps, first.num_stages,
        first.max_registers, mailbox=first.grid // shares if shares else first.mailbox + 1, is_cooperative=not shares,
        schedule=first.schedule,
    )  # fmt: skip


def _function(p: Parts) -> str:
    """A stage as a function of its block.  What other programs stored is read past this multiprocessor's cache."""
    lines = [line.replace("tl.program_id(0)", "block") for line in p.lines]
    for hint in (EVICT_FIRST, EVICT_LAST):
        lines = [line.replace(hint, L2_ONLY) for line in lines]
    return signature(p.name, [*p.parameters, "block"], []) + "\n".join(lines) + "\n"


def _call_as_last(out: Writer, p: Parts, own: list[str], shares: int, each: int) -> None:
    """``each`` blocks of ``p`` make up the program's own block."""
    block = f"tl.program_id(0) // {shares}"
    out.line(f"if is_last({MAILBOX} + {block}, {shares}):")
    out.depth += 1
    if each == 1:
        out.line(_called(p, own, block))
    else:
        out.line(f"at = {block} * {each}")
        out.line(f"for block in tl.range(at, tl.minimum(at + {each}, {p.name}_blocks), num_stages=1):")
        out.line(f"    {_called(p, own, 'block')}")
    out.depth -= 1


def _called(p: Parts, own: list[str], block: str) -> str:
    pointers = [x for x in p.parameters if x.endswith("_ptr")]
    return f"{p.name}({', '.join([*pointers, *own, block])})"


def _call(out: Writer, p: Parts, own: list[str], mailbox: int, *, interpret: bool) -> None:
    """``mailbox``: words that come before the count of those that met."""
    first, step = "tl.program_id(0)", "tl.num_programs(0)"
    if interpret:
        out.line("if tl.program_id(0) == tl.num_programs(0) - 1:")
        out.depth += 1
        first, step = "0", "1"
    else:
        out.line(f"meet_all({MAILBOX}{f' + {mailbox}' if mailbox else ''})")
    out.line(f"for block in tl.range({first}, {p.name}_blocks, {step}, num_stages=1):")
    out.depth += 1
    out.line(_called(p, own, "block"))
    out.depth -= 2 if interpret else 1
