"""What Inductor's kernels of a region take: an estimate from bytes, launches and passes over them.

Figures, with what was measured, are in ``device/region_costs.py``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import torch
from torch.fx import Node

from ..device.region_costs import (
    BYTES_PER_US,
    COLUMN_ROWS,
    COLUMNS_UNSPLIT,
    DRAWN_POWER,
    INDUCTOR_BLOCK,
    INDUCTOR_COLUMN_SHARE,
    INDUCTOR_COLUMN_VARIANCE_SHARE,
    INDUCTOR_COLUMNS_SHARE,
    INDUCTOR_CONVOLUTION_SHARE,
    INDUCTOR_FINISH_US,
    INDUCTOR_GROUPED,
    INDUCTOR_HEAVY,
    INDUCTOR_IMAGE_SHARE,
    INDUCTOR_LOOP_SHARE,
    INDUCTOR_MASKED_SHARE,
    INDUCTOR_MIXED_SHARE,
    INDUCTOR_OPS_PER_US,
    INDUCTOR_POINTWISE_OPS_PER_US,
    INDUCTOR_ROW_SHARE,
    INDUCTOR_SCATTERED_SHARE,
    INDUCTOR_SHORT_SHARE,
    INDUCTOR_STORED_MASK,
    JOINED,
    KERNEL_US,
    L2_BYTES,
    MASKED_ROW,
    MIXED_COLUMNS,
    MIXED_ROWS,
    PERSISTENT_ROW,
    REALIZED_READS,
    REREAD,
    RESIDENT_ROWS,
)
from ..schedulers.limits import power_of_two
from .aten_table import aten_ops, is_view
from .memory_orders import is_image_in_channels_last
from .node_facts import elements, is_fusable, nbytes, op_name
from .reduction_kernel import ReductionKernel, axes_of, kernel_of, source_of
from .region_border import made_by
from .regions import Region
from .translation import hinted, tensor_of

DRAW = "inductor_random"
"""The op that draws a number for each element."""


def inductor_us(region: Region, *, is_mix_order: bool) -> tuple[float, int]:
    """Of all kernels, and how many: one for each way to reduce, with pointwise ops whose inputs each reads again.

    ``is_mix_order``: its ``triton.mix_order_reduction`` is on, so that sums of rows and of columns may share a kernel.
    """
    kernels: dict[ReductionKernel, list[Node]] = {}
    for n in region.reductions:
        kernels.setdefault(kernel_of(n), []).append(n)
    largest = max((nbytes(n) for n in (*region.inputs, *region.outputs)), default=0)
    wide = [n for n in region.outputs if 2 * nbytes(n) >= largest]
    owner = _owner_of(region, kernels, wide)
    if owner is not None and is_mix_order and _is_mixed(owner, list(kernels)):
        return _mixed_us(region, kernels, owner, wide), len(region.reductions) - len(kernels[owner]) + 1
    realized = _realized(region, kernels)
    total = 0.0
    for k, n in enumerate(realized):
        if n not in wide:  # what makes the wide ones is below; the first that reads it makes it, and stores it
            total += sum(map(nbytes, _read(region, [n], realized[:k]))) / BYTES_PER_US
    for kernel, of in kernels.items():
        total += _kernel_us(region, kernel, of, wide if kernel == owner else [], realized)
    launches = len(kernels)
    if owner is None and wide:
        moved = sum(map(nbytes, (*_read(region, wide), *wide))) / BYTES_PER_US
        total += KERNEL_US + max(moved, _computed(region, wide))
        launches += 1
    return total * (INDUCTOR_GROUPED if any(is_grouped(n, region) for n in region.reductions) else 1.0), launches


def _computed(region: Region, made: Sequence[Node]) -> float:
    return computed_by(region, made, INDUCTOR_HEAVY, joins_whole=True) / INDUCTOR_POINTWISE_OPS_PER_US


def is_grouped(reduction: Node, region: Region) -> bool:
    """Are its rows of several axes, of several rows, for which indices are divided?

    Axes next to each other in memory are one, as pixels are, where an operand has a value for each row, or for each
    element, or is one number.
    """
    kernel, source = kernel_of(reduction), source_of(reduction)
    sizes = list(map(hinted, source.shape))
    axes = sorted(d for d in axes_of(reduction, len(sizes)) if sizes[d] > 1)
    if not kernel.is_inner or kernel.kept <= 1 or len(axes) <= 1:
        return False
    is_one = all(hinted(source.stride(a)) == hinted(source.stride(b)) * sizes[b] for a, b in pairwise(axes))
    counts = {math.prod(map(hinted, tensor_of(n).shape)) for n in region.inputs}
    return not is_one or any(kernel.kept != n < kernel.reduced * kernel.kept for n in counts if n > 1)


def _mixed_us(
    region: Region,
    kernels: Mapping[ReductionKernel, Sequence[Node]],
    rows: ReductionKernel,
    wide: Sequence[Node],
) -> float:
    """Rows and columns at once, and what adds up each of the columns; columns of what is stored then are read again."""
    columns = [n for kernel, of in kernels.items() if kernel != rows for n in of]
    later = [n for n in columns if any(w in _between(region, [n]) for w in wide)]
    at_once = [*kernels[rows], *(n for n in columns if n not in later), *wide]
    moved = sum(map(nbytes, (*_read(region, at_once), *region.outputs))) / (BYTES_PER_US * INDUCTOR_MIXED_SHARE)
    finish = INDUCTOR_FINISH_US * (len(columns) - len(later))
    again = sum(_kernel_us(region, kernel_of(n), [n], []) for n in later)
    return KERNEL_US + moved + finish + again


def _owner_of(
    region: Region, kernels: Mapping[ReductionKernel, Sequence[Node]], wide: Sequence[Node]
) -> ReductionKernel | None:
    """The kernel over whole rows that makes the wide results too: where they wait for no other kernel's."""
    owner = next((k for k in kernels if k.is_inner and k.side_by_side == k.reduced), None)
    if owner is None or not wide:
        return owner
    if owner.is_split:
        return None
    waited = [n for n in _upstream(region, wide) if n.target in aten_ops().reductions]
    return owner if all(kernel_of(n) == owner for n in waited) else None


def _upstream(region: Region, roots: Sequence[Node]) -> list[Node]:
    inside = dict.fromkeys((*region.nodes, *region.again))
    found: dict[Node, None] = {}
    waiting = list(roots)
    while waiting:
        n = waiting.pop()
        if n not in found and n in inside:
            found[n] = None
            waiting += n.all_input_nodes
    return list(found)


def _is_mixed(rows: ReductionKernel, kernels: Sequence[ReductionKernel]) -> bool:
    """Does one kernel of Inductor's reduce ``rows`` and the columns of the same tensor?  By Inductor's conditions."""
    others = [k for k in kernels if k != rows]
    if len(others) != 1 or (others[0].kept, others[0].reduced) != (rows.reduced, rows.kept):
        return False
    return rows.kept >= max(MIXED_ROWS, 2 * rows.reduced) and rows.reduced <= MIXED_COLUMNS


def _realized(region: Region, kernels: Mapping[ReductionKernel, Sequence[Node]]) -> list[Node]:
    """What Inductor stores though it is pointwise: several read it, and it is made of many tensors.

    A kernel that holds its rows stores nothing for itself.
    """
    found: list[Node] = []
    behind = [(kernel, set(_upstream(region, of))) for kernel, of in kernels.items()]
    for n in region.nodes:
        readers = [kernel for kernel, before in behind if n in before]
        is_pointwise = n.target not in aten_ops().reductions and n.target is not operator.getitem and not is_view(n)
        is_again = len(readers) > 1 or any(k.reduced > PERSISTENT_ROW for k in readers)
        if is_pointwise and is_again and _reader_count(n) > 1 and len(_read(region, [n], found)) > REALIZED_READS:
            found.append(n)
    return found


def _reader_count(n: Node) -> int:
    """Readers of ``n`` and of its views."""
    return sum(_reader_count(u) if is_view(u) else 1 for u in n.users)


def _kernel_us(
    region: Region,
    kernel: ReductionKernel,
    reductions: Sequence[Node],
    wide: Sequence[Node],
    realized: Sequence[Node] = (),
) -> float:
    """``wide``: results that it makes besides.  ``realized``: stored, and read unless it makes it."""
    roots = [*reductions, *wide]
    stored = [n for n in (*realized, *(() if kernel.is_inner else region.outputs)) if n not in roots]
    inputs = _read(region, roots, stored)
    read = sum(map(nbytes, inputs))
    written = sum(nbytes(n) for n in roots if n in region.outputs)
    if not kernel.is_inner:
        share = _column_share(reductions)
        if kernel.is_short_middle and any(INDUCTOR_HEAVY.get(op_name(n), 1) > 1 for n in _between(region, roots)):
            share = INDUCTOR_SHORT_SHARE
        moved = (read + written) / (BYTES_PER_US * share)
        is_split = kernel.kept < COLUMNS_UNSPLIT and kernel.reduced >= COLUMN_ROWS
        finishing = KERNEL_US * len(reductions) * is_split
        computed = computed_by(region, roots, INDUCTOR_HEAVY, stored) / INDUCTOR_OPS_PER_US
        return KERNEL_US + max(moved, computed) + finishing
    if kernel.is_scattered:
        return KERNEL_US + (read + written) / (BYTES_PER_US * INDUCTOR_SCATTERED_SHARE)
    if kernel.is_split:
        return 2 * KERNEL_US + (read + written) / (BYTES_PER_US * INDUCTOR_LOOP_SHARE)
    between = _between(region, roots)
    drawn = is_drawn(region)
    masks = [n for n in between if drawn and n in region.outputs and tensor_of(n).dtype is torch.bool]
    written += sum(nbytes(n) for n in masks if n not in roots)
    heavy = {**INDUCTOR_HEAVY, DRAW: INDUCTOR_HEAVY[DRAW] + INDUCTOR_STORED_MASK * bool(masks)}
    heavy = drawn_in_blocks(heavy, kernel.reduced, min(power_of_two(kernel.reduced), INDUCTOR_BLOCK))
    computed = computed_by(region, roots, heavy, stored, joins_whole=True) / INDUCTOR_POINTWISE_OPS_PER_US
    if kernel.reduced <= PERSISTENT_ROW:
        moved = (read + written) / BYTES_PER_US
        share = _row_share(kernel, reductions, inputs)
        return KERNEL_US + (beside(moved, computed) if drawn else max(moved / share, computed))
    depth = _depths(region)
    passes = 1 + max(depth[n] for n in reductions) - min(depth[n] for n in reductions) + (1 if wide else 0)
    later = min(read, sum(map(nbytes, _read(region, [n for n in roots if n not in realized], realized))))
    row = later / max(kernel.kept, 1)
    again = REREAD if row * min(RESIDENT_ROWS, kernel.kept) <= L2_BYTES else 1.0
    moved = (read + later * again * (passes - 1) + written) / (BYTES_PER_US * INDUCTOR_LOOP_SHARE)
    return KERNEL_US + (beside(moved, computed) if drawn else max(moved, computed))


def _row_share(kernel: ReductionKernel, reductions: Sequence[Node], inputs: Sequence[Node]) -> float:
    """Of a kernel that holds its rows, or would if they were not normed ones of images."""
    if any(map(_is_variance, reductions)):
        made = [made_by(n) for n in inputs]
        if any(n.target is torch.ops.aten.convolution.default for n in made):
            return INDUCTOR_CONVOLUTION_SHARE
        if any(is_fusable(n) and is_image_in_channels_last(n.meta.get("val")) for n in made):
            return INDUCTOR_IMAGE_SHARE
    return INDUCTOR_MASKED_SHARE if _is_masked_softmax(kernel, reductions) else INDUCTOR_ROW_SHARE


def _is_masked_softmax(kernel: ReductionKernel, reductions: Sequence[Node]) -> bool:
    """Is a long row asked whether anything of it is left, beside its maximum and the sum of its exponentials?"""
    asks = any(n.target is torch.ops.aten.any.dim for n in reductions)
    return asks and kernel.reduced >= MASKED_ROW and any(_is_softmax(n) for n in reductions)


def _is_softmax(n: Node) -> bool:
    return n.target is torch.ops.aten.amax.default or "prepare_softmax" in str(n.target)


def _column_share(reductions: Sequence[Node]) -> float:
    if any(map(_is_variance, reductions)):
        return INDUCTOR_COLUMN_VARIANCE_SHARE
    return INDUCTOR_COLUMN_SHARE if len(reductions) <= 2 else INDUCTOR_COLUMNS_SHARE


def _is_variance(n: Node) -> bool:
    return n.target in (torch.ops.aten.var_mean.correction, torch.ops.aten.var.correction)


def computed_by(
    region: Region,
    roots: Sequence[Node],
    heavy: Mapping[str, int],
    stored: Sequence[Node] = (),
    *,
    joins_whole: bool = False,
) -> float:
    """Instructions of a kernel that makes ``roots`` of what it loads, for all elements together.

    ``heavy``: those of an op, where they are more than one.  ``joins_whole``: as Inductor computes what is joined.
    """
    total = 0.0
    between = _between(region, roots, stored)
    lanes = _lanes(region, between) if joins_whole else {}
    for n in between:
        if isinstance(n.meta.get("val"), torch.Tensor):
            total += max(elements(n), lanes.get(n, 0)) * heavy.get(op_name(n), 1)
    return total


def _lanes(region: Region, between: Collection[Node]) -> dict[Node, int]:
    """Of what becomes a part of a joined tensor the elements of that: Inductor computes each part for all of them.

    The gradients of a gated GELU, which are joined, 8192 x 2304, took 70 us so, and 27 where each is computed once.
    Parts behind reductions, and those of long lists, it computes once.
    """
    joins = [n for n in between if n.target is torch.ops.aten.cat.default and _is_computed_whole(region, n)]
    found: dict[Node, int] = {}
    for n in reversed(region.nodes) if joins else ():
        sizes = [math.prod(map(hinted, tensor_of(u).shape)) for u in joins if u in n.users]
        found[n] = max([*sizes, *(found.get(u, 0) for u in n.users if u in between and u not in joins)], default=0)
    return found


def _is_computed_whole(region: Region, join: Node) -> bool:
    is_short = len(join.all_input_nodes) <= JOINED
    return is_short and not any(n.target in aten_ops().reductions for n in _upstream(region, [join]))


def _depths(region: Region) -> dict[Node, int]:
    """Of each node how many reductions stand one behind the other up to it; a softmax's two are one for Inductor."""
    depth: dict[Node, int] = {}
    for n in region.nodes:
        before = max((depth.get(a, 0) for a in n.all_input_nodes), default=0)
        is_pass = n.target in aten_ops().reductions and n.target is not torch.ops.aten.amax.default
        depth[n] = before + (1 if is_pass else 0)
    return depth


def _read(region: Region, roots: Sequence[Node], stored: Sequence[Node] = ()) -> list[Node]:
    """What a kernel that computes ``roots`` loads: inputs, results of reductions on the way, and what is ``stored``."""
    between = _between(region, roots, stored)
    loaded = {a: None for n in between for a in n.all_input_nodes if a not in between}
    return [n for n in loaded if isinstance(n.meta.get("val"), torch.Tensor | tuple | list)]


def _between(region: Region, roots: Sequence[Node], stored: Sequence[Node] = ()) -> dict[Node, None]:
    """What a kernel that makes ``roots`` computes of what it loads: ``roots``, and pointwise ops on the way, again."""
    inside = dict.fromkeys((*region.nodes, *region.again))
    found: dict[Node, None] = dict.fromkeys(roots)
    waiting = [a for n in roots for a in n.all_input_nodes]
    while waiting:
        n = waiting.pop()
        if n in found or n not in inside or n in stored:
            continue
        if n.target not in aten_ops().reductions and n.target is not operator.getitem:
            found[n] = None
            waiting += n.all_input_nodes
    return found


def drawn_in_blocks(heavy: Mapping[str, int], row: int, block: int) -> dict[str, int]:
    """``heavy`` where numbers are drawn for every lane of the blocks of a row, those behind its end too."""
    lanes = -(-row // block) * block
    return {**heavy, DRAW: heavy[DRAW] * lanes // max(row, 1)}


def beside(moved: float, computed: float) -> float:
    """Of a kernel that draws numbers, whose bytes and rounds hide each other but in part."""
    return (moved**DRAWN_POWER + computed**DRAWN_POWER) ** (1 / DRAWN_POWER)


def is_drawn(region: Region) -> bool:
    """Is a number drawn for each element, of half of the largest tensor at least?"""
    tensors = [n for n in (*region.inputs, *region.outputs) if isinstance(n.meta.get("val"), torch.Tensor)]
    largest = max((math.prod(map(hinted, tensor_of(n).shape)) for n in tensors), default=0)
    drawn = (math.prod(map(hinted, tensor_of(n).shape)) for n in region.nodes if op_name(n) == DRAW)
    return 2 * max(drawn, default=-1) >= largest
