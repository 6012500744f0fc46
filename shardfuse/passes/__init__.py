"""Passes: from a recorded fusion to one whose shardings are settled and whose layout changes stand alone."""

from __future__ import annotations

from collections.abc import Callable

from ..ir.expr import BoundFusion
from .bind import bind
from .casts import combine_casts
from .concatenated_pieces import make_in_parts
from .copies import remove_copies
from .dead_code import remove_dead_code
from .decompose import decompose_resharding
from .pipeline import pipeline_streams
from .propagate import propagate_shardings
from .roughness import mark_rough_ops
from .segments import sum_in_segments
from .windows import fuse_windows

Pass = Callable[[BoundFusion], None]

PASSES: tuple[Pass, ...] = (
    remove_dead_code,  # first: nothing below works on what is not read
    combine_casts,  # before shardings: a cast that goes needs none
    mark_rough_ops,  # before sums are cut, and while all that is made of a result is there
    sum_in_segments,  # before shardings: segments are an axis, which is sharded as what it is cut from
    propagate_shardings,  # needs the final Exprs: each of its tensors gets a mesh
    decompose_resharding,  # from here on, an Expr computes or communicates, never both
    remove_copies,  # what is left of a change of sharding once its collective stands alone
    pipeline_streams,  # needs the collectives: a chunk's is to run beside the next chunk's kernels
    make_in_parts,  # before a cat becomes a choice between windows, element by element
    fuse_windows,  # the axes that are read at other places are whole on every rank by now
    remove_dead_code,  # again: what a merged statistic, or what a window reads past, was computed from before
)

__all__ = ["PASSES", "Pass", "bind"]
