"""Kernels that one launch does one after the other: between two of them all programs meet.

The first is the launch's own function; each later one is a function that its programs call in turn, a block each.
Every program must be resident, which a cooperative launch sees to.  The interpreter runs programs one after the other:
there the last one does what comes after.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.expr import BoundTensor
from .exchange import MAILBOX
from .source import KernelSource, Parts, Writer, body_text, signature

MEET_ALL = '''@triton.jit
def meet_all(ptr):
    """Come, and wait until every program of this launch has: the count only grows, by as many in each launch."""
    tl.debug_barrier()
    programs = tl.num_programs(0)
    come = tl.atomic_add(ptr, 1, sem="acq_rel") + 1
    last = (come + programs - 1) // programs * programs
    while come < last:
        come = tl.atomic_add(ptr, 0, sem="acquire")
    tl.debug_barrier()
'''


def one_launch(name: str, tensors: Sequence[BoundTensor], parts: Sequence[Parts], *, interpret: bool) -> KernelSource:
    """``parts`` in order, as one kernel ``name`` of ``tensors``."""
    first, *later = parts
    assert not any(p.scalars for p in later), f"{name} has scalars behind its first stage"
    helpers = {"meet_all": MEET_ALL} if not interpret else {}
    integers = dict(first.integers)
    out = Writer()
    for p in later:
        helpers |= p.helpers
        helpers[p.name] = _function(p)
        own = {f"{p.name}_{key}": value for key, value in p.integers.items()}
        integers |= {**own, f"{p.name}_blocks": (p.grid, "tl.int32")}
        out.paragraph()
        _call(out, p, list(own), interpret=interpret)
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
        first.max_registers, mailbox=1,
    )  # fmt: skip


def _function(p: Parts) -> str:
    """A stage as a function of its block.  What other programs stored is read past this multiprocessor's cache."""
    lines = [line.replace("tl.program_id(0)", "block") for line in p.lines]
    lines = [line.replace('eviction_policy="evict_last"', 'cache_modifier=".cg"') for line in lines]
    return signature(p.name, [*p.parameters, "block"], []) + "\n".join(lines) + "\n"


def _call(out: Writer, p: Parts, own: list[str], *, interpret: bool) -> None:
    pointers = [x for x in p.parameters if x.endswith("_ptr")]
    first, step = "tl.program_id(0)", "tl.num_programs(0)"
    if interpret:
        out.line("if tl.program_id(0) == tl.num_programs(0) - 1:")
        out.depth += 1
        first, step = "0", "1"
    else:
        out.line(f"meet_all({MAILBOX})")
    out.line(f"for block in tl.range({first}, {p.name}_blocks, {step}, num_stages=1):")
    out.depth += 1
    out.line(f"{p.name}({', '.join([*pointers, *own, 'block'])})")
    out.depth -= 2 if interpret else 1
