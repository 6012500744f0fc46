"""Blocks of one accumulator combined: chunks lane by lane, and what the lanes have in the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .accumulators import Accumulator
from .emitter import Emitter
from .packed import Packed
from .statements import MARGIN


def combined(e: Emitter, acc: Accumulator, name: str, terms: Iterable[str]) -> str:
    """Chunks combined lane by lane, in order: their text, or ``name``."""
    if isinstance(e, Packed):
        return _stepwise(e, acc, name, terms)
    texts = list(terms)
    joined = " + ".join(texts)
    if len(texts) == 1 or (not acc.helper and len(joined) < MARGIN - 40):
        return joined
    e.out.line(f"{name} = {texts[0]}")
    for text in texts[1:] if acc.helper else _packed(texts[1:]):
        accumulate(e, acc, name, text)
    return name


def _stepwise(e: Packed, acc: Accumulator, name: str, terms: Iterable[str]) -> str:
    """A chunk is taken in and forgotten before the next is looked at."""
    for k, text in enumerate(terms):
        if k:
            accumulate(e, acc, name, text)
        else:
            e.out.line(f"{name} = {text}")
        e.forget()
    return name


def across_blocks(e: Emitter, name: str, acc: Accumulator, blocks: Sequence[str]) -> str:
    """A block for each piece of the columns, reduced to one value, or one for each column or group."""
    found = e.across_lanes(name, acc, blocks)
    return found[0] if len(found) == 1 else combined(e, acc, f"{name}_groups", found)


def _packed(texts: Sequence[str]) -> list[str]:
    """Sums of ``texts`` that fit on a line each."""
    lines = [""]
    for text in texts:
        joined = f"{lines[-1]} + {text}" if lines[-1] else text
        if lines[-1] and len(joined) >= MARGIN - 40:
            lines.append(text)
        else:
            lines[-1] = joined
    return lines


def accumulate(e: Emitter, acc: Accumulator, name: str, text: str) -> None:
    e.out.line(f"{name} = {acc.combined(name, text)}" if acc.helper else f"{name} += {text}")
