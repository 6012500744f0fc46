"""The exchange of a team: partial results of programs that share a row, through a mailbox in global memory.

Each member stores one word for each reduction, ``epoch << 32 | bits``, and polls until the word of every member carries
the epoch of this exchange: the value is the flag.  No atomics on data, no fence, no reset.

A mailbox belongs to one bound kernel with one grid, of ``teams`` teams (``teams = grid / members``)::

    words   [2, teams, slots, members]   int64, slots: reductions that are exchanged at once
    epochs  [grid]                       int64, each program its own, kept between launches

It is zeroed once.  Epochs begin with 1.  The writer of epoch e + 2 cannot overtake a reader of epoch e, because it has
waited for that reader's word of epoch e + 1: two sets are enough.  A word is taken where its epoch is *equal*.  Every
program must be resident, which a cooperative launch sees to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir.dtype import DataType
from ..ir.expr import Expr
from ..schedulers.plan import KernelPlan
from .reduction import accumulator

MAILBOX = "mailbox_ptr"
"""The kernel's first argument."""

_LARGEST_BLOCK = 1 << 20
"""Elements: Triton has no larger ones."""

POST = '''@triton.jit
def post(ptr, epoch, value):
    """Store 32 bits of ``value`` below ``epoch``: one word, so that neither is seen without the other."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.store(ptr, (epoch.to(tl.int64) << 32) | bits)
'''

COLLECT = '''@triton.jit
def collect(ptr, epoch, MEMBERS: tl.constexpr):
    """The bits of every member's word, once all carry ``epoch``."""
    words = tl.load(ptr + tl.arange(0, MEMBERS), volatile=True)
    while tl.sum(((words >> 32).to(tl.int32) != epoch).to(tl.int32), axis=0) != 0:
        words = tl.load(ptr + tl.arange(0, MEMBERS), volatile=True)
    return (words & 0xFFFFFFFF).to(tl.int32)
'''

COLLECT_BOUNDED = '''@triton.jit
def collect(ptr, epoch, MEMBERS: tl.constexpr):
    """The bits of every member's word, once all carry ``epoch``, or whatever is there after {turns} turns."""
    words = tl.load(ptr + tl.arange(0, MEMBERS), volatile=True)
    turns = 0
    while (tl.sum(((words >> 32).to(tl.int32) != epoch).to(tl.int32), axis=0) != 0) & (turns < {turns}):
        words = tl.load(ptr + tl.arange(0, MEMBERS), volatile=True)
        turns += 1
    return (words & 0xFFFFFFFF).to(tl.int32)
'''


def member_alone(plan: KernelPlan) -> KernelPlan:
    """``plan`` with teams of one: the interpreter runs one program after the other, so that none can wait."""
    block = plan.params.r_block * (plan.params.team if plan.params.unrolled else 1)
    return replace(plan, params=replace(plan.params, team=1, r_block=min(block, _LARGEST_BLOCK)))


def slots(plan: KernelPlan) -> int:
    """Reductions of the phase that has most of them."""
    space = plan.space
    phases = [
        space.phase[e.output]
        for e in plan.segment.exprs
        if any(map(space.has_r, e.tensors)) and not space.has_r(e.output)
    ]
    return max(map(phases.count, phases), default=0)


def mailbox_words(plan: KernelPlan, grid: int) -> int:
    """64-bit words of the mailbox of a kernel with ``grid`` programs."""
    return 2 * grid * slots(plan) + grid


def head_lines(plan: KernelPlan) -> list[str]:
    """Before the loop over rows: who this program is, and its epoch."""
    members = plan.params.team
    per_team = members * slots(plan)
    return [
        f"member = tl.program_id(0) % {members}",
        f"team = tl.program_id(0) // {members}",
        f"teams = tl.num_programs(0) // {members}",
        f"epoch_ptr = {MAILBOX} + teams * {2 * per_team} + tl.program_id(0)",
        "epoch = tl.load(epoch_ptr).to(tl.int32)",
    ]


def team_lines(body: Sequence[str], *, has_rows: bool, interpret: bool) -> list[str]:
    """``body`` for each row of the team in turn (``i0`` rows in all), and what comes after the last."""
    lines = list(body)
    if has_rows:
        # A loop's index is 32-bit; the interpreter's is Python's own.
        x = "        x = row" if interpret else "        x = row.to(tl.int64)"
        loop = "    for row in tl.range(team, i0, teams, num_stages=1):"
        lines = [loop, x, *(f"    {line}" if line else "" for line in body)]
    return ["", *lines, "", "    tl.store(epoch_ptr, epoch.to(tl.int64))"]


def exchange_lines(plan: KernelPlan, parts: Sequence[tuple[Expr, str]]) -> tuple[list[str], dict[Expr, str]]:
    """``parts``: reductions of one phase with the text of this member's result.

    Gives the lines that exchange them all at once, and for each the text of the whole result (carried as the
    accumulator's type).
    """
    members = plan.params.team
    lines = ["epoch += 1", f"box = {MAILBOX} + ((epoch & 1) * teams + team) * {members * slots(plan)}"]
    for k, (_, text) in enumerate(parts):
        lines.append(f"post(box + {_slot(k, members)}member, epoch, {text})")
    whole: dict[Expr, str] = {}
    for k, (expr, _) in enumerate(parts):
        acc = accumulator(expr)
        bits = f"collect(box + {k * members}, epoch, {members})" if k else f"collect(box, epoch, {members})"
        if acc.dtype is DataType.Float:
            bits = f"{bits}.to(tl.float32, bitcast=True)"
        whole[expr] = acc.reduced(bits, 0)
    return lines, whole


def exchange_helpers(turns: int | None) -> dict[str, str]:
    """Functions of the file.  ``turns``: polls after which a program gives up and goes on with what it has."""
    return {"post": POST, "collect": COLLECT if turns is None else COLLECT_BOUNDED.format(turns=turns)}


def _slot(k: int, members: int) -> str:
    return f"{k * members} + " if k else ""
