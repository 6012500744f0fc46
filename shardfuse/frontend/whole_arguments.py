"""A whole tensor that was passed in place of a shard, of which an op says only that its sizes do not fit."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from ..errors import ShapeError
from ..ir.fusion import Fusion
from ..ir.tensor_view import TensorView
from .bound_call import BoundCall


@contextmanager
def wholes_named(fusion: Fusion, call: BoundCall) -> Generator[None]:
    """A ``ShapeError`` of the body says which argument is the whole, where that is why sizes do not fit.

    An unsharded size that is not declared is taken for a local one times the ranks: of a whole that is more than there
    is.
    """
    try:
        yield
    except ShapeError as error:
        inputs = {i.val.name: i.val for i in fusion.inputs if isinstance(i.val, TensorView)}
        for name, axis, fitting in error.of_inputs:
            tv = inputs[name]
            found, counted = call.bound.local_shapes[tv][axis], call.sizes[tv][axis]
            if tv in call.sized or tv.shape[axis] >= 0 or found != fitting or not 0 < found < counted:
                continue
            ranks = counted // found
            shard = f"{-(-found // ranks)}{' at most' if found % ranks else ''}"
            error.advise(
                f"axis {axis} of {name} is sharded, and {found} elements of it were passed on each of {ranks} ranks: "
                f"if that is the whole, pass this rank's shard of {shard}, else correct the sizes"
            )
            break
        raise
