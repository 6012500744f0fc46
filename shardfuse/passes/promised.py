"""Which ops stand against what a fusion promises: one error, before anything is planned."""

from __future__ import annotations

from ..errors import PromiseError
from ..ir.expr import DRAWS, BoundFusion

_BY_SIZE = {
    **dict.fromkeys(
        ("matmul", "linear", "grouped_mm", "scaled_grouped_mm", "block_scaled_mm"),
        "the library that multiplies matrices chooses the order of its additions by their sizes",
    ),
    **dict.fromkeys(("sdpfa_fwd", "sdpfa_bwd"), "attention chooses the order of its additions by its sizes"),
    **dict.fromkeys(("cumsum", "cumprod"), "torch's scans choose the order of their additions by their sizes"),
    "index_put_accumulate": "what meets at one index is added in whatever order it comes",
}
"""Ops of torch that add up in an order that is not theirs alone to say."""


def check_promises(fusion: BoundFusion) -> None:
    """Raise PromiseError for an op of ``fusion`` that cannot keep what ``fusion`` promises."""
    promises = fusion.promises
    for expr in fusion.exprs if promises.invariant else ():
        named = f"{expr.output} = {expr.op}"
        if expr.op in _BY_SIZE:
            raise PromiseError(str(promises), f"{_BY_SIZE[expr.op]} ({named})", "take it out of the fusion")
        if expr.op in DRAWS and promises.batch:
            found = f"random numbers follow from the place of an element ({named})"
            raise PromiseError(str(promises), found, "pass them in as a tensor")
