"""The two forms of a kernel's body: r held in registers chunk by chunk, or walked by a loop for each phase."""

from __future__ import annotations

from collections.abc import Iterable

from ..ir.expr import BoundTensor, Expr
from .emitter import Emitter
from .reduction import Accumulator, accumulator
from .source import MARGIN
from .tile import Chunk

R_SIZE = "i1"
"""Argument: reduced elements of this rank."""
R_SHARE = "i2"
"""Argument: reduced elements of one program of a split reduction."""


def write_unrolled(e: Emitter) -> None:
    """Loads, math and stores once, every chunk of r in registers throughout.

    Pointwise kernels are the case of one chunk and no reduction.
    """
    chunks = e.tile.chunks()
    last = e.space.phases - 1
    for phase in range(e.space.phases):
        if phase == last and e.params.team:
            _write_chunk_by_chunk(e, chunks)
            return
        reductions = e.reductions(phase)
        wanted = list(e.plan.segment.outputs) if phase == last else [x.tensors[0] for x in reductions]
        for chunk in chunks:
            e.load_needed(wanted, chunk)
        if e.params.team and phase == 0:
            e.prefetch_next()
        e.out.paragraph()
        for chunk in chunks:
            for tensor in wanted:
                e.value(tensor, chunk)
        _finish(e, ((expr, _combined(e, expr, chunks)) for expr in reductions))
        e.out.paragraph()
    for tensor in e.plan.segment.outputs:
        for chunk in chunks if e.space.has_r(tensor) else chunks[:1]:
            e.store(tensor, chunk)


def _write_chunk_by_chunk(e: Emitter, chunks: list[Chunk]) -> None:
    """The last phase with the stores of a chunk before the loads of the next.

    The compiler moves loads up; all weights beside the whole row took 96 registers where 56 are enough.
    """
    outputs = e.plan.segment.outputs
    standing = [t for t in outputs if not e.space.has_r(t)]
    e.load_needed(standing, chunks[0])
    for tensor in standing:
        e.value(tensor, chunks[0])
    for tensor in e.needed(outputs, chunks[0]):
        if not e.space.has_r(tensor):
            e.value(tensor, chunks[0])
    for tensor in standing:
        e.store(tensor, chunks[0])
    rows = [t for t in outputs if e.space.has_r(t)]
    for chunk in chunks if rows else []:
        e.out.paragraph()
        e.load_needed(rows, chunk)
        for tensor in rows:
            e.value(tensor, chunk)
        for tensor in rows:
            e.store(tensor, chunk)


def _finish(e: Emitter, parts: Iterable[tuple[Expr, str]]) -> None:
    """The reductions of a phase across the lanes, and across the team where there is one."""
    if e.params.team:
        e.exchange(list(parts))
        return
    for expr, text in parts:
        e.finish(expr, text)


def _combined(e: Emitter, expr: Expr, chunks: list[Chunk]) -> str:
    """The chunks combined lane by lane: one reduction across the lanes is left, which does not grow with the row."""
    acc = accumulator(expr)
    texts = [e.combine(expr, e.value(expr.tensors[0], chunk), chunk) for chunk in chunks]
    joined = " + ".join(texts)
    if len(texts) == 1 or (not acc.helper and len(joined) < MARGIN - 40):
        return joined if not acc.helper else texts[0]
    name = f"{expr.output}_acc"
    e.out.line(f"{name} = {texts[0]}")
    for text in texts[1:] if acc.helper else _packed(texts[1:]):
        _accumulate(e, acc, name, text)
    return name


def _packed(texts: list[str]) -> list[str]:
    """Sums of ``texts`` that fit on a line each."""
    lines = [""]
    for text in texts:
        joined = f"{lines[-1]} + {text}" if lines[-1] else text
        if len(joined) < MARGIN - 40:
            lines[-1] = joined
        else:
            lines.append(text)
    return lines


def _accumulate(e: Emitter, acc: Accumulator, name: str, text: str) -> None:
    e.out.line(f"{name} = {acc.combined(name, text)}" if acc.helper else f"{name} += {text}")


def write_loops(e: Emitter) -> None:
    """One loop over r for each phase: a value that rests on k reductions belongs to phase k and is read anew there."""
    tile = e.tile
    block = e.params.r_block
    masked = tile.r_total % block != 0
    chunk = Chunk("", None, block, masked)
    outputs = e.plan.segment.outputs
    for phase in range(e.space.phases):
        reductions = e.reductions(phase)
        stored = [t for t in outputs if e.space.has_r(t) and e.space.phase[t] == phase]
        if reductions or stored:
            _write_loop(e, reductions, stored, chunk)
    e.load_needed([t for t in outputs if not e.space.has_r(t)], chunk)
    for tensor in outputs:
        if not e.space.has_r(tensor):
            e.value(tensor, chunk)
    e.out.paragraph()
    for tensor in outputs:
        if not e.space.has_r(tensor):
            e.store(tensor, chunk)


def _write_loop(e: Emitter, reductions: list[Expr], stored: list[BoundTensor], chunk: Chunk) -> None:
    wanted = [*(x.tensors[0] for x in reductions), *stored]
    for tensor in e.needed(wanted, chunk):
        if not e.space.has_r(tensor):
            e.value(tensor, chunk)
    e.out.paragraph()
    for expr in reductions:
        acc = accumulator(expr)
        e.out.line(f"{expr.output}_acc = {acc.start(e.tile.shape)}")
    first, last = ("first", "last") if e.plan.split or e.params.team else ("0", R_SIZE)
    e.out.line(f"for start in tl.range({first}, {last}, {e.params.r_block}, num_stages={e.params.num_stages}):")
    e.out.depth += 1
    e.out.line("r = start + c")
    if chunk.is_masked:
        e.out.line(f"r_mask = r < {R_SIZE}")
    e.load_needed(wanted, chunk)
    for tensor in wanted:
        e.value(tensor, chunk)
    for expr in reductions:
        acc = accumulator(expr)
        if acc.helper:
            e.require(acc.helper)
        value = e.value(expr.tensors[0], chunk)
        _accumulate(e, acc, f"{expr.output}_acc", e.combine(expr, value, chunk))
    for tensor in stored:
        e.store(tensor, chunk)
    e.out.depth -= 1
    e.values = {k: v for k, v in e.values.items() if not e.space.has_r(k[0])}
    _finish(e, ((expr, f"{expr.output}_acc") for expr in reductions))
