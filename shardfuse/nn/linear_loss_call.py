"""What the ranks of a loss over chunks of rows have to agree on, of which each chunk is a program by itself."""

from __future__ import annotations

from functools import lru_cache

from ..mesh.calls import Call
from ..mesh.process import ledger_of
from ..source_line import caller_line
from .loss import CrossEntropyLoss

_KEPT = 256
"""Calls whose lines are kept: numbers of rows, which batches of changing length have several of."""


def note_call(loss: CrossEntropyLoss, rows: int, chunk: int, reduction: str, *, has_bias: bool) -> None:
    """Note a call of ``rows`` in chunks of ``chunk``, where classes are sharded.

    Ranks whose calls differ end by an error that has both.  A rank with more chunks would else take those of the next
    call for its own.
    """
    mesh = loss.mesh
    if mesh is None or mesh.size < 2 or loss.logits_placement.resolve("logits", 2).parts(mesh, 1) < 2:
        return
    ledger = ledger_of(mesh.ranks)
    if ledger is not None:
        ledger.note(_call_of(rows, min(chunk, rows), reduction, has_bias))


@lru_cache(maxsize=_KEPT)
def _call_of(rows: int, chunk: int, reduction: str, has_bias: bool) -> Call:
    bias = "with a bias" if has_bias else "without a bias"
    text = f"LinearCrossEntropyLoss({reduction=}) of {rows} rows, {chunk} in a chunk, {bias}"
    return Call.of(text, line=caller_line(in_modules=True))
