"""The two forms of a kernel's body: r held in registers chunk by chunk, or walked by a loop for each phase."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..ir.dtype import DataType
from ..ir.expr import BoundTensor, Expr
from ..ir.op import Pick
from ..schedulers.limits import power_of_two
from ..segments.online_reductions import counts_lanes
from .accumulators import Accumulator, accumulators
from .emitter import Emitter
from .group_exchange import prefetch_next, write_group_exchange
from .mesh_exchange import write_exchange, write_members
from .misaligned import MisalignedLoop
from .packed import Packed
from .row_blocks import sums_made_first
from .running_statistics import across_lanes, across_members, give, held, write_start, write_take_in
from .sending import Sending
from .statements import live_before
from .tile import R_SIZE, Chunk


def write_unrolled(e: Emitter) -> None:
    """Loads, math and stores once, every chunk of r in registers throughout.

    Pointwise kernels are the case of one chunk and no reduction.
    """
    chunks = e.tile.in_pieces(e.tile.chunks())
    last = e.space.phases - 1
    early = sums_made_first(e.space)
    is_row = e.space.is_inner and e.tile.x_block == 1 and last > 0
    is_row &= not e.space.is_by_sample  # one number for a part of the row: behind stores each would be waited for
    for phase in range(e.space.phases):
        if phase == last and (e.schedule.members or is_row):
            write_last_phase(e, chunks, early)
            return
        reductions = e.reductions(phase)
        wanted = list(e.plan.segment.outputs) if phase == last else [x.tensors[0] for x in reductions]
        sums = [] if phase else early
        more = e.plan.segment.outputs if e.schedule.is_eager else ()
        alone = [] if phase or e.schedule.members else _picked_first(e)
        for pick in alone:
            e.load_needed(pick.tensors[1:2], chunks[0])
        for chunk in chunks:
            e.load_needed([*wanted, *sums, *more], chunk)
        for pick in alone:
            e.value(pick.output, chunks[0])
        if e.schedule.prefetches and phase == 0:
            prefetch_next(e)
        if isinstance(e, Sending) and phase == 0:
            e.send(chunks)
        e.out.paragraph()
        _compute(e, chunks, wanted, sums)
        _finish(e, ((expr, held(e, expr, chunks)) for expr in reductions))
        e.out.paragraph()
    for tensor in _others(e, early):
        for chunk in chunks if e.space.has_r(tensor) else chunks[: len(e.tile.pieces)]:
            e.store(tensor, chunk)


def _compute(e: Emitter, chunks: Iterable[Chunk], wanted: Sequence[BoundTensor], stored: Sequence[BoundTensor]) -> None:
    """The values of ``wanted``, chunk by chunk, and those that are ``stored`` at once."""
    for chunk in chunks:
        for tensor in wanted:
            e.value(tensor, chunk)
        for tensor in stored:
            e.store(tensor, chunk)


def _picked_first(e: Emitter) -> list[Expr]:
    """What reads one element of each row by itself, and waits for no reduction: on its way while the row is reduced."""
    return [x for x in e.plan.segment.exprs if isinstance(x.op, Pick) and not e.space.phase[x.tensors[0]]]


def load_and_compute(e: Emitter, wanted: Sequence[BoundTensor], chunks: Iterable[Chunk]) -> None:
    """The loads of all chunks, then the values of ``wanted`` in each."""
    chunks = list(chunks)
    for chunk in chunks:
        e.load_needed(wanted, chunk)
    e.out.paragraph()
    for chunk in chunks:
        for tensor in wanted:
            e.value(tensor, chunk)


def write_packed(e: Packed) -> None:
    """All loads, then phase after phase, chunk after chunk."""
    chunks = e.tile.chunks()
    e.begin()
    e.read(e.space.streamed, chunks)
    for phase in range(e.space.phases - 1):
        reductions = e.reductions(phase)
        if phase:
            e.renew()
        e.out.paragraph()
        _write_invariant(e, [x.tensors[0] for x in reductions], chunks[0])
        _finish(e, ((expr, held(e, expr, chunks)) for expr in reductions))
    e.renew()
    e.out.paragraph()
    write_last_phase(e, chunks)


def write_last_phase(e: Emitter, chunks: list[Chunk], early: Sequence[BoundTensor] = ()) -> None:
    """The last phase with the stores of a chunk before the loads of the next.

    The compiler moves loads up; all weights beside the whole row took 96 registers where 56 are enough.  RMSNorm of
    8192 x 32768, held as float32 by one program, took 277 us with all weights loaded first, so 265.
    ``early``: outputs that are stored already.
    """
    outputs = _others(e, early)
    per_row = [t for t in outputs if not e.space.has_r(t)]
    for chunk in chunks[: len(e.tile.pieces)]:
        e.make(per_row, chunk)
        _write_invariant(e, outputs, chunk)
        for tensor in per_row:
            e.store(tensor, chunk)
    rows = [t for t in outputs if e.space.has_r(t)]
    for k, chunk in enumerate(chunks if rows else []):
        e.out.paragraph()
        if isinstance(e, Packed):
            e.read_ahead(rows, chunks[k : k + 2])
        e.make(rows, chunk)
        for tensor in rows:
            e.store(tensor, chunk)


def _others(e: Emitter, early: Sequence[BoundTensor]) -> list[BoundTensor]:
    return [t for t in e.plan.segment.outputs if t not in early]


def _finish(e: Emitter, parts: Iterable[tuple[Expr, tuple[str, ...]]]) -> None:
    """``parts``: the reductions of a phase with what this program has; emits their values, or the group's or ranks'."""
    if e.schedule.members and e.plan.exchange is None:  # all reductions of the phase at once
        parts = list(parts)
        if parts:
            take_whole(e, [expr for expr, _ in parts], write_group_exchange(e, _named(e, parts)))
        return
    if e.plan.exchange is not None:
        parts = list(parts)
        own = e.plan.exchange.statistics
        write_exchange(e, [(expr, texts[0]) for expr, texts in parts if expr.output in own])
        parts = [(expr, texts) for expr, texts in parts if expr.output not in own]
        if e.plan.exchange.members > 1:
            write_members(e, [(expr, texts[0]) for expr, texts in parts])
            return
    for expr, texts in parts:
        give(e, expr, texts)


def parts_of(e: Emitter, reductions: Sequence[Expr], chunks: list[Chunk]) -> list[tuple[DataType, str]]:
    """What this member has of ``reductions``, its part of the row being in registers: type and name of each number."""
    return _named(e, [(expr, held(e, expr, chunks)) for expr in reductions])


def _named(e: Emitter, parts: Sequence[tuple[Expr, tuple[str, ...]]]) -> list[tuple[DataType, str]]:
    words: list[tuple[DataType, str]] = []
    for expr, texts in parts:
        for out, acc, text in zip(expr.outputs, accumulators(expr), texts, strict=True):
            name = f"{out}_part"
            e.use(acc.helper)
            if text != name:
                e.out.line(f"{name} = {text}")
            words.append((acc.dtype, name))
    return words


def take_whole(e: Emitter, reductions: Sequence[Expr], whole: Sequence[str]) -> None:
    """The values of ``reductions`` from the texts of what all members have of them."""
    remaining = iter(whole)
    for expr in reductions:
        texts = [of_members(e, acc, next(remaining)) for acc in accumulators(expr)]
        give(e, expr, across_members(e, expr, texts))


def of_members(e: Emitter, acc: Accumulator, text: str) -> str:
    """What the members of a group have: lanes come in powers of two."""
    members = e.schedule.members
    lanes = power_of_two(members)
    return text if lanes == members else f"tl.where(tl.arange(0, {lanes}) < {members}, {text}, {acc.neutral})"


def write_loops(e: Emitter) -> None:
    """One loop over r for each phase: a value that rests on k reductions belongs to phase k and is read anew there."""
    tile = e.tile
    block = e.schedule.reduced
    masked = tile.r_total % block != 0
    chunks = e.tile.in_pieces([Chunk("", None, block, masked, block)])
    outputs = e.plan.segment.outputs
    walk = 0
    for phase in range(e.space.phases):
        reductions = e.reductions(phase)
        stored = [t for t in outputs if e.space.has_r(t) and e.space.phase[t] == phase]
        if reductions or stored:
            _write_loop(e, reductions, stored, chunks, backwards=walk % 2 == 1)
            walk += 1
    per_row = [t for t in outputs if not e.space.has_r(t)]
    for chunk in chunks:
        e.make(per_row, chunk)
    e.out.paragraph()
    for chunk in chunks:
        for tensor in per_row:
            e.store(tensor, chunk)


def _write_loop(
    e: Emitter, reductions: list[Expr], stored: list[BoundTensor], chunks: Sequence[Chunk], *, backwards: bool
) -> None:
    """One walk.  Every other goes backwards, so that it begins with what was read last."""
    wanted = [*(x.tensors[0] for x in reductions), *stored]
    for chunk in chunks:
        _write_invariant(e, wanted, chunk)
    e.out.paragraph()
    is_parted = bool(e.plan.split or e.schedule.members)
    turns = chunks
    if chunks[0].is_masked and not (is_parted or backwards) and any(map(counts_lanes, reductions)):
        turns = [replace(c, is_masked=False) for c in chunks]  # the rest is a turn of its own: lanes need no counts
    for chunk in turns:
        for expr in reductions:
            write_start(e, expr, chunk)
    if isinstance(e, MisalignedLoop):
        e.begin(chunks[0])
        _write_misaligned(e, reductions, chunks)
        return
    first, last = ("first", "last") if is_parted else ("0", R_SIZE)
    if turns is not chunks:
        e.out.line(f"whole = {R_SIZE} // {e.schedule.reduced} * {e.schedule.reduced}")
        last = "whole"
    if backwards:
        e.out.line(f"back = {_last_start(e, first, last)}")
    step = "step" if backwards else "start"
    with e.out.loop(step, first, last, e.schedule.reduced, e.schedule.launch.stages):
        if backwards:
            e.out.line("start = back - step")
        _write_turn(e, reductions, stored, turns, "start")
    if turns is not chunks:
        _write_turn(e, reductions, stored, chunks, "whole")
    _finish(e, ((expr, across_lanes(e, expr)) for expr in reductions))


def _write_misaligned(e: MisalignedLoop, reductions: list[Expr], chunks: Sequence[Chunk]) -> None:
    """Every turn is masked: the first holds elements before the row, the last some behind it."""
    chunks = [replace(c, is_masked=True) for c in chunks]
    block, e.is_whole = e.schedule.reduced, True
    with e.out.loop("start", "0", "whole", block, e.schedule.launch.stages):
        _write_turn(e, reductions, [], chunks, "start")
    e.is_whole = False
    _write_turn(e, reductions, [], chunks, "whole")
    _finish(e, ((expr, across_lanes(e, expr)) for expr in reductions))


def _write_invariant(e: Emitter, wanted: Sequence[BoundTensor], chunk: Chunk) -> None:
    """The loop-invariant values that ``wanted`` depends on: those without an index along r."""
    for tensor in e.needed(wanted, chunk):
        if not e.space.has_r(tensor):
            e.value(tensor, chunk)


def _write_turn(
    e: Emitter, reductions: list[Expr], stored: list[BoundTensor], chunks: Sequence[Chunk], start: str
) -> None:
    """What a loop does with the block that begins at ``start``."""
    wanted = [*(x.tensors[0] for x in reductions), *stored]
    at, chunks = len(e.out.statements), [replace(c, turn=start) for c in chunks]
    lines = [f"r = {start} + c", *([f"r_mask = r < {R_SIZE}"] if chunks[0].is_masked else [])]
    for line in e.index_lines(start) if isinstance(e, MisalignedLoop) and chunks[0].is_masked else lines:
        e.out.line(line)
    for chunk in chunks:
        e.load_needed(wanted, chunk)
    for chunk in chunks:
        for tensor in wanted:
            e.value(tensor, chunk)
        for expr in reductions:
            write_take_in(e, expr, chunk, start)
        for tensor in stored:
            e.store(tensor, chunk)
    if not chunks[0].is_masked and not live_before(e.out.statements[at + 1 :], ["r"]):
        del e.out.statements[at]
    e.values = {k: v for k, v in e.values.items() if not e.space.has_r(k[0])}


def _last_start(e: Emitter, first: str, last: str) -> str:
    """Where the last block of a walk begins, and ``first`` more, which the first step takes off.

    In blocks from ``first``: of a difference from ``last`` the compiler would not know that it is aligned.
    """
    block = e.schedule.reduced
    if first == "0":
        return f"(tl.cdiv({last}, {block}) - 1) * {block}"
    return f"{first} + {first} + (tl.cdiv({last} - {first}, {block}) - 1) * {block}"
