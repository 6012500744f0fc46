"""What a region takes, as shardfuse's kernels and as Inductor's: an estimate from bytes, launches and passes.

Figures are of an H200 with torch 2.11 (``docs/measured.md``); what counts is the ratio of the two sides, which other
GPUs have much the same.  Where the two models are unsure, Inductor's is the cheaper and shardfuse's the dearer one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch.fx import Node

from ..frontend.explain import Explanation
from .regions import Region, is_fusable, nbytes
from .table import aten_ops
from .translation import argument, hinted, tensor_of

BYTES_PER_US = 4.3e6
"""Of a large copy, read and written: 4250 GB/s at 1 GB."""
KERNEL_US = 3.0
"""A kernel's start and end, beside what its bytes take: copies of 32 to 512 MB lose 5 us, of which a stream of kernels
hides some."""
HOST_US = 5.0
"""What the host takes for a call of the op beyond the launch of one kernel of Inductor's; 0 in CUDA graphs."""
SHARE_OF_COPY = {"persistent": 0.88, "mix_order": 0.80, "reduction": 0.85, "pointwise": 0.85, "transpose": 0.75}
"""The least shares of a copy that each scheduler's kernels reach in ``docs/measured.md``, apart from odd rows."""
OTHER_SHARE = 0.6
"""Of any other scheduler's kernels: loops over what no program holds."""
CHANNELS_SHARE = 0.4
"""Of a persistent kernel over inner and outer axes at once, as a group norm's gradient."""
PERSISTENT_ROW = 1024
"""Elements of a row that a kernel of Inductor's holds (``persistent_reduction`` of an inner reduction)."""
INDUCTOR_ROW_SHARE, INDUCTOR_LOOP_SHARE, INDUCTOR_COLUMN_SHARE = 0.92, 0.85, 0.85
"""Shares of a copy: rows held, rows looped over, and columns, in kernels of Inductor's that read once."""
INDUCTOR_MIXED_SHARE = 0.72
"""Of a kernel of Inductor's that reduces rows and columns at once: 0.55 to 0.72 was measured."""
MIXED_ROWS, MIXED_COLUMNS = 4096, 16384
"""Rows at least, and columns at most, of such a kernel."""
REREAD = 0.35
"""What a further pass over a row costs, of the first, where the rows of all programs stay in L2."""
L2_BYTES = 30e6
"""Of 50 MB: what rows that are read again may take."""
RESIDENT_ROWS = 132 * 4
MARGIN = 0.95
"""A region is taken where it is expected to take less than this of Inductor's time."""


@dataclass(frozen=True)
class Cost:
    """Microseconds.  ``border``: of tensors that the op makes Inductor store and load; ``host``: see ``HOST_US``."""

    ours: float
    inductor: float
    border: float
    host: float

    @property
    def gains(self) -> bool:
        return self.ours + self.border + self.host < MARGIN * self.inductor

    def __str__(self) -> str:
        at_border = f" + {self.border:.1f} at its border" if self.border else ""
        on_host = f" + {self.host:.1f} of the host" if self.host else ""
        return f"expected {self.ours:.1f} us{at_border}{on_host} against {self.inductor:.1f} us of Inductor's kernels"


def cost_of(region: Region, plan: Explanation, *, has_cuda_graphs: bool, is_mix_order: bool) -> Cost:
    """``has_cuda_graphs``, ``is_mix_order``: of Inductor's configuration."""
    host = 0.0 if has_cuda_graphs else HOST_US
    return Cost(_ours(plan), inductor_us(region, is_mix_order=is_mix_order), border_us(region), host)


def why_never(plan: Explanation) -> str | None:
    """A plan that is no match for Inductor's whatever the sizes."""
    calls = [s.text.split("\n")[0] for s in plan.segments if s.scheduler == "torch_call"]
    if calls:
        return f"a part of it is a call of torch: {calls[0]}"
    return None


def _ours(plan: Explanation) -> float:
    total = 0.0
    for s in plan.segments:
        if s.scheduler in ("no_op", "communication"):
            continue
        share = SHARE_OF_COPY.get(s.scheduler, OTHER_SHARE)
        total += max(len(s.kernels), 1) * KERNEL_US + s.bytes / (BYTES_PER_US * share)
    return total


def border_us(region: Region) -> float:
    """Of what would stay in registers if Inductor had all: written by one side, read by the other."""
    moved = sum(nbytes(n) for n in region.inputs if is_fusable(n))
    for n in region.outputs:
        readers = [u for u in n.users if u not in region.nodes]
        if readers and all(is_fusable(u) for u in readers):
            moved += 2 * nbytes(n)
    kernels = KERNEL_US if moved else 0.0
    return kernels + moved / BYTES_PER_US


# --- Inductor ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ReductionKernel:
    """One kernel of Inductor's: everything that is reduced over ``reduced`` elements of each of ``kept``."""

    kept: int
    reduced: int
    is_inner: bool


def inductor_us(region: Region, *, is_mix_order: bool) -> float:
    """Kernels by what they reduce: Inductor fuses pointwise ops into each, and reads their inputs in each again.

    ``is_mix_order``: its ``triton.mix_order_reduction`` is on, so that sums of rows and of columns may share a kernel.
    """
    kernels: dict[_ReductionKernel, list[Node]] = {}
    for n in region.reductions:
        kernels.setdefault(_kernel_of(n), []).append(n)
    depth = _depths(region)
    total = 0.0
    largest = max((nbytes(n) for n in (*region.inputs, *region.outputs)), default=0)
    wide = [n for n in region.outputs if 2 * nbytes(n) >= largest]
    owner = next((k for k in kernels if k.is_inner), None)
    if owner is not None and is_mix_order and _is_mixed(owner, list(kernels)):
        roots = [*region.reductions, *wide]
        moved = sum(map(nbytes, _read(region, roots))) + sum(map(nbytes, region.outputs))
        return 2 * KERNEL_US + moved / (BYTES_PER_US * INDUCTOR_MIXED_SHARE)
    for kernel, reductions in kernels.items():
        is_owner = kernel is owner
        roots = [*reductions, *wide] if is_owner else reductions
        read = sum(nbytes(n) for n in _read(region, roots))
        written = sum(nbytes(n) for n in (wide if is_owner else reductions) if n in region.outputs)
        passes = 1 + max(depth[n] for n in reductions) - min(depth[n] for n in reductions)
        passes += 1 if is_owner and wide else 0
        total += _kernel_us(kernel, read, written, passes)
    if owner is None and wide:
        total += KERNEL_US + (sum(map(nbytes, (*_read(region, wide), *wide)))) / BYTES_PER_US
    return total


def _is_mixed(rows: _ReductionKernel, kernels: Sequence[_ReductionKernel]) -> bool:
    """Does one kernel of Inductor's reduce ``rows`` and the columns of the same tensor?  By Inductor's conditions."""
    others = [k for k in kernels if k != rows]
    if len(others) != 1 or (others[0].kept, others[0].reduced) != (rows.reduced, rows.kept):
        return False
    return rows.kept >= max(MIXED_ROWS, 2 * rows.reduced) and rows.reduced <= MIXED_COLUMNS


def _kernel_us(kernel: _ReductionKernel, read: float, written: float, passes: int) -> float:
    if not kernel.is_inner:
        return KERNEL_US + (read + written) / (BYTES_PER_US * INDUCTOR_COLUMN_SHARE)
    if kernel.reduced <= PERSISTENT_ROW:
        return KERNEL_US + (read + written) / (BYTES_PER_US * INDUCTOR_ROW_SHARE)
    row = read / max(kernel.kept, 1)
    again = REREAD if row * min(RESIDENT_ROWS, kernel.kept) <= L2_BYTES else 1.0
    moved = read * (1 + again * (passes - 1)) + written
    return KERNEL_US + moved / (BYTES_PER_US * INDUCTOR_LOOP_SHARE)


def _kernel_of(node: Node) -> _ReductionKernel:
    source = tensor_of(cast(Node, node.args[0]))
    sizes = [hinted(n) for n in source.shape]
    axes = _axes(node, len(sizes))
    reduced = math.prod(sizes[d] for d in axes)
    is_inner = all(d in axes for d in range(min(axes, default=0), len(sizes)) if sizes[d] != 1)
    return _ReductionKernel(math.prod(sizes) // max(reduced, 1), reduced, is_inner)


def _axes(node: Node, ndim: int) -> list[int]:
    if node.target is torch.ops.aten.native_layer_norm.default:
        return list(range(ndim - len(cast(Sequence[int], node.args[1])), ndim))
    given = argument(node, 1, "dim")
    axes = [given] if isinstance(given, int) else list(cast("Sequence[int] | None", given) or range(ndim))
    return [d % ndim for d in axes]


def _depths(region: Region) -> dict[Node, int]:
    """Of each node how many reductions stand one behind the other up to it; a softmax's two are one for Inductor."""
    depth: dict[Node, int] = {}
    for n in region.nodes:
        before = max((depth.get(a, 0) for a in n.all_input_nodes), default=0)
        is_pass = n.target in aten_ops().reductions and n.target is not torch.ops.aten.amax.default
        depth[n] = before + (1 if is_pass else 0)
    return depth


def _read(region: Region, roots: Sequence[Node]) -> list[Node]:
    """What a kernel that computes ``roots`` loads: inputs of the region, and results of reductions on the way.

    Pointwise ops on the way are computed again.
    """
    inside = dict.fromkeys((*region.nodes, *region.again))
    found: dict[Node, None] = {}
    seen: dict[Node, None] = {}
    waiting = [a for n in roots for a in (n.all_input_nodes if n.target in aten_ops().reductions else [n])]
    while waiting:
        n = waiting.pop()
        if n in seen:
            continue
        seen[n] = None
        if n not in inside:
            found[n] = None
        elif n.target not in aten_ops().reductions and n.target is not operator.getitem:
            waiting += n.all_input_nodes
    return list(found)
