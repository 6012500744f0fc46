"""Cuts a decomposed fusion into segments, each of which one scheduler runs.

1. Casts, views and windows of one tensor, and what depends on indices and numbers alone, are *cheap*: each segment
   that reads one makes its own copy of it, so that what stands in memory between two segments is the tensor before the
   cast.
2. Every other Expr starts as a segment.  Walking in order, it joins the segments of its producers where a scheduler
   takes the two together and no third segment stands between them.
3. Segments that read the same tensor, and do not depend on each other, join likewise.
4. A pointwise chain whose result another segment reads is computed again there, where that moves fewer bytes; its
   readers join.
5. Small independent all-reduces over the same ranks are one, and pointwise segments that wait for it one launch.  So
   are sums in pairs that wait for the same segment alone, as those of the partial sums that a kernel makes.
6. Sums over other axes of what a kernel holds row by row are made of sums of blocks of these rows, which it stores; and
   rows that wait for sums of such sums are held by the kernel that makes them.  Where programs would walk such rows
   twice, columns are summed first, and all other sums are made of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from .analysis.communication_table import communication_of, local_bytes, packed
from .analysis.sharding import is_opaque
from .device import WARP, Device
from .ir.expr import BoundFusion, BoundTensor, Expr
from .ir.op import Cast, Full, Iota, Pointwise, Reduce, Reshape, Set, View, Window
from .schedulers.choice import choose_scheduler, is_one_kernel, is_taken, lone_scheduler, named, takes_over
from .segments.recompute import join, moved_bytes, recompute
from .segments.rows_behind_sums import hold_rows_behind_sums
from .segments.segment import Segment, in_running_order, touches_empty
from .segments.space import common_cuts, refusal_of
from .segments.sums_of_blocks import RowsAndSums, sum_in_blocks
from .segments.sums_of_planes import sum_in_planes

_SLACK = (1.0, 1.25)
"""Up to how many times the bytes that are saved a chain may read: all ways to cut are tried, the one that moves the
fewest bytes is taken.  Two readers that each read as much as they save are one kernel that reads it once: the weight
gradients of a group norm in float32."""


_ADDS_UP = "reduction", "pointwise"
"""Schedulers that take the sums of sums of blocks, of which there may be one."""


@dataclass(frozen=True)
class ScheduledSegment:
    """``refusals``: what each scheduler before the chosen one said."""

    segment: Segment
    scheduler: str
    refusals: tuple[tuple[str, str], ...]


def segment_fusion(fusion: BoundFusion, device: Device) -> list[ScheduledSegment]:
    """Segments in an order in which they can run."""
    return _Segmenter(fusion, device).run()


def _share_cuts(exprs: Sequence[Expr]) -> bool:
    """Can one kernel walk all of them?  Only a reshape cuts an index where another tensor does not."""
    if all(not isinstance(e.op, Reshape) or is_opaque(e) for e in exprs):
        return True
    return not isinstance(common_cuts(t for e in exprs for t in (*e.tensors, *e.outputs)), str)


def _axes(tensor: BoundTensor) -> int:
    """Axes of more than one element."""
    return len([axis for axis in tensor.domain.logical if axis])


class _Segmenter:
    def __init__(self, fusion: BoundFusion, device: Device) -> None:
        self.fusion, self.device = fusion, device
        self.producer = fusion.producer_of()
        self.position = {expr: k for k, expr in enumerate(fusion.exprs)}
        self.readers: dict[BoundTensor, list[Expr]] = {}
        for expr in fusion.exprs:
            for t in expr.tensors:
                self.readers.setdefault(t, []).append(expr)
        self.indices: dict[BoundTensor, None] = {}
        self.windowed = dict.fromkeys(e.tensors[0] for e in fusion.exprs if isinstance(e.op, Window))
        self.cheap: dict[Expr, bool] = {}
        for expr in fusion.exprs:
            self.settle_cheap(expr)
        self.alone = dict.fromkeys(e for e in fusion.exprs if self.stands_alone(e))
        stored = self.stored()
        self.placed = dict.fromkeys(e for e in fusion.exprs if not self.cheap[e] or e.output in stored)
        self.group_of: dict[Expr, int] = {}
        self.groups: dict[int, list[Expr]] = {}
        self.depends: dict[int, dict[int, None]] = {}
        self.lone: dict[int, str] = {}
        """Of groups that are joined with no other, their schedulers."""
        self.unreduced: dict[int, None] = {}
        """Groups that are known to reduce nothing."""

    def run(self) -> list[ScheduledSegment]:
        for expr in self.placed:
            self.place(expr)
        self.join_what_is_left()
        self.join_siblings()
        self.pack_collectives()
        self.join_what_waits_for_one()
        order = self.in_order(list(self.groups))
        segments = [self.segment_of(self.groups[g]) for g in order]
        kernels = [s for s, g in zip(segments, order, strict=True) if g not in self.lone]
        chosen = {s: self.lone.get(g) for s, g in zip(segments, order, strict=True)}
        segments = min((self.recomputed(segments, kernels, slack) for slack in _SLACK), key=moved_bytes)
        segments, instead = sum_in_blocks(segments, WARP * self.device.access_bytes, self.hold_blocks)
        self.replace(instead)
        segments, instead = hold_rows_behind_sums(
            segments, self.fusion.outputs, WARP * self.device.access_bytes, self.hold_rows
        )
        self.replace(instead)
        segments, instead = sum_in_planes(segments, self.walk_planes)
        self.replace(instead)
        return [
            # of collectives that are packed nothing else is asked
            ScheduledSegment(s, "communication", ())
            if chosen.get(s) == "communication"
            else ScheduledSegment(s, *named(s, self.device))
            for s in segments
        ]

    def recomputed(self, segments: list[Segment], kernels: Sequence[Segment], slack: float) -> list[Segment]:
        """``segments`` with chains computed again, and readers of the same tensors joined."""
        outputs = self.fusion.outputs
        takes = partial(takes_over, device=self.device)
        changed = recompute(segments, outputs, self.position, kernels.__contains__, takes, slack)
        if changed == segments:
            return segments
        made = [*kernels, *(s for s in changed if s not in segments)]
        return join(changed, self.position, made.__contains__, partial(is_taken, device=self.device))

    def hold_blocks(self, before: RowsAndSums, after: RowsAndSums) -> bool:
        """Are these rows that a kernel holds, and sums, as they were before?"""
        names = [choose_scheduler(s, self.device)[0] for s in (*before, *after)]
        return names[:3] == ["persistent", "reduction", "persistent"] and names[3] in _ADDS_UP

    def hold_rows(self, before: list[Segment], after: list[Segment]) -> bool:
        """Is there one kernel now that holds rows, where two read them, and do the others what they did?"""
        (held, total, *left), (sums, between, _) = after, before
        names = [choose_scheduler(s, self.device)[0] for s in (sums, held, total)]
        kept = all(takes_over(between, s, self.device) or is_taken(s, self.device) for s in left)
        return names[:2] == ["reduction", "persistent"] and names[2] in _ADDS_UP and kept

    def walk_planes(self, before: RowsAndSums, after: list[Segment]) -> bool:
        """Are these rows that are walked twice, of which so many bytes less are read that it makes up for two launches
        more?"""
        twice = sum(map(local_bytes, before[0].inputs))
        if moved_bytes(before) + twice - moved_bytes(after) < self.device.measured.groups.planes:
            return False
        names = [choose_scheduler(s, self.device)[0] for s in (*before, *after)]
        return names[:5] == ["looped", "reduction", "reduction", "reduction", "pointwise"] and names[5] in _ADDS_UP

    def replace(self, instead: Mapping[Expr, list[Expr]]) -> None:
        """Have what is in place of some Exprs of the fusion."""
        self.fusion.exprs = in_running_order(new for e in self.fusion.exprs for new in instead.get(e, [e]))

    # cheap producers

    def is_cheap(self, expr: Expr) -> bool:
        if communication_of(expr) is not None or is_opaque(expr) or touches_empty(expr):
            return False
        if self.is_of_indices(expr):
            self.indices[expr.output] = None
            return True
        if isinstance(expr.op, Cast):
            is_wider = expr.output.dtype.itemsize >= expr.tensors[0].dtype.itemsize
            return is_wider and refusal_of(expr) is None  # a kernel has no complex numbers
        if isinstance(expr.op, Window):
            return refusal_of(expr) is None
        return isinstance(expr.op, View)

    def is_of_indices(self, expr: Expr) -> bool:
        """Does it depend on indices and numbers alone, and does a kernel compute it?"""
        if not all(t in self.indices for t in expr.tensors) or refusal_of(expr) is not None:
            return False
        return isinstance(expr.op, Full | Iota | Cast | View | Pointwise)

    def settle_cheap(self, expr: Expr) -> None:
        """Views whose cuts do not go together (``[6] -> [3, 2] -> [2, 3]``) are not copied into one segment."""
        is_cheap = self.is_cheap(expr) and expr.output not in self.windowed
        self.cheap[expr] = is_cheap and _share_cuts([expr])
        chain = self.with_cheap([expr])
        if len(chain) > 1 and not _share_cuts(chain):
            for t in expr.tensors:
                if t in self.producer:
                    self.cheap[self.producer[t]] = False

    def stored(self) -> dict[BoundTensor, None]:
        """What must be in memory: the fusion's outputs, and what a segment that stands alone reads."""
        found = dict.fromkeys(self.fusion.outputs)
        for expr in self.fusion.exprs:
            if expr in self.alone:
                found.update(dict.fromkeys(expr.tensors))
        return found

    def stands_alone(self, expr: Expr) -> bool:
        if (isinstance(expr.op, Window) or expr.output in self.indices) and not touches_empty(expr):
            return False
        name = lone_scheduler(Segment.of([expr], [expr.output]), self.device)
        return name is not None and not (name == "no_op" and self.cheap[expr])

    def with_cheap(self, exprs: Sequence[Expr]) -> list[Expr]:
        """``exprs`` and the cheap producers that they need, in order."""
        found = dict.fromkeys(exprs)
        todo = list(exprs)
        while todo:
            for t in todo.pop().tensors:
                maker = self.producer.get(t)
                if maker is not None and maker not in found and self.cheap[maker]:
                    found[maker] = None
                    todo.append(maker)
        return sorted(found, key=self.position.__getitem__) if len(found) > 1 else list(found)

    def segment_of(self, group: Sequence[Expr]) -> Segment:
        exprs = list(group) if group[0] in self.alone else self.with_cheap(group)
        inside = dict.fromkeys(exprs)
        own = dict.fromkeys(group)
        outputs = dict.fromkeys(self.fusion.outputs)
        needed = [
            t
            for e in group
            for t in e.outputs
            if t in outputs or any(self.is_read(r, inside, own) for r in self.readers.get(t, []))
        ]
        return Segment.of(exprs, needed)

    def is_read(self, reader: Expr, inside: Iterable[Expr], own: Iterable[Expr]) -> bool:
        """Does ``reader``, or a segment that makes its own copy of ``reader``, stand outside?"""
        if not self.cheap[reader]:
            return reader not in inside
        if reader not in own and reader in self.placed:
            return True
        return any(self.is_read(r, inside, own) for r in self.readers.get(reader.output, []))

    # groups

    def place(self, expr: Expr) -> None:
        g = len(self.position) and self.position[expr]
        self.groups[g] = [expr]
        self.group_of[expr] = g
        self.depends[g] = dict.fromkeys(h for h in self.feeding(expr) if h != g)
        name = lone_scheduler(self.segment_of([expr]), self.device)
        if name is not None:
            self.lone[g] = name
            return
        for h in sorted(self.depends[g], reverse=True):
            if h in self.depends[g]:
                self.try_join(h, g)

    def join_what_is_left(self) -> None:
        """Where what stood between two groups has joined one of them since, they are neighbours now."""
        for b in sorted(self.groups):
            tried: dict[int, None] = {}
            while left := [h for h in sorted(self.depends.get(b, ()), reverse=True) if h not in tried]:
                tried[left[0]] = None
                self.try_join(left[0], b)

    def feeding(self, expr: Expr) -> list[int]:
        """The groups whose tensors ``expr`` reads, through cheap producers too.

        A view that its segment copies comes from no group: nothing waits for it where it is an output too.
        """
        own = [expr] if expr in self.alone else self.with_cheap([expr])
        makers = [self.producer[t] for e in own for t in e.tensors if t in self.producer]
        placed = [(e, self.group_of[e]) for e in makers if e in self.group_of]
        return list(dict.fromkeys(g for e, g in placed if e not in own or self.lone.get(g) != "no_op"))

    def try_join(self, a: int, b: int) -> bool:
        """Make one group of ``a`` and ``b``, ``b`` the later, if a scheduler takes them and no other stands between."""
        if a in self.lone or b in self.lone or self.between(a, b):
            return False
        if self.groups[a][0].chunk != self.groups[b][0].chunk:
            return False
        if self.lengthens(a, b):
            self.merge(a, b, [*self.groups[a], *self.groups[b]])
            self.unreduced[b] = None
            return True
        exprs = sorted((*self.groups[a], *self.groups[b]), key=self.position.__getitem__)
        if not is_one_kernel(self.segment_of(exprs), self.device):
            return False
        self.merge(a, b, exprs)
        return True

    def lengthens(self, a: int, b: int) -> bool:
        """Is ``b`` one operation more on what the pointwise group ``a`` makes, element by element?

        Then no scheduler says anything else of both than it said of ``a``: what is read and made has the domain of an
        output of ``a``.  That need not be asked of a chain again for each of its operations.
        """
        made, (expr, *others) = self.groups[a], self.groups[b]
        if others or len(made) < 2:
            return False
        own, domain, last = self.with_cheap([expr]), expr.output.domain, self.position[made[-1]]
        if any(not isinstance(e.op, Pointwise | Cast | Set) or self.position[e] < last for e in own):
            return False
        if any(t.domain != domain for e in own for t in (*e.tensors, e.output)):
            return False
        makers = [self.producer[t] for e in own for t in e.tensors if t in self.producer]
        if all(self.group_of.get(e) != a for e in makers):
            return False
        return a in self.unreduced or not any(isinstance(e.op, Reduce) for e in self.with_cheap(made))

    def merge(self, a: int, b: int, exprs: list[Expr]) -> None:
        """Put ``exprs``, those of both, in ``b``."""
        self.groups[b] = exprs
        for e in self.groups.pop(a):
            self.group_of[e] = b
        self.depends[b] = {h: None for h in (*self.depends[b], *self.depends.pop(a)) if h not in (a, b)}
        for others in self.depends.values():
            if a in others:
                del others[a]
                others[b] = None

    def pack_collectives(self) -> None:
        found = [g for g in self.groups if self.lone.get(g) == "communication"]
        for b in found:
            for a in found:
                if a >= b or a not in self.groups or b not in self.groups:
                    continue
                exprs = sorted((*self.groups[a], *self.groups[b]), key=self.position.__getitem__)
                if packed(exprs) and not self.reaches(b, a) and not self.reaches(a, b):
                    self.merge(a, b, exprs)

    def join_what_waits_for_one(self) -> None:
        """Pointwise segments that wait for the same packed collective, and for nothing else, are one launch; so are
        sums in pairs that wait for the same segment."""
        waiting: dict[tuple[int, ...], int] = {}
        for b in sorted(self.groups):
            key = tuple(self.depends.get(b, ()))
            is_of_ranks = len(key) == 1 and self.lone.get(key[0]) == "communication"
            if len(key) != 1 or not (self.is_pointwise(b) if is_of_ranks else self.adds_in_pairs(b)):
                continue
            if key in waiting:
                self.try_join(waiting[key], b)
            waiting[key] = b

    def adds_in_pairs(self, g: int) -> bool:
        return any(isinstance(e.op, Reduce) and e.op.in_pairs for e in self.groups[g])

    def is_pointwise(self, g: int) -> bool:
        return choose_scheduler(self.segment_of(self.groups[g]), self.device)[0] == "pointwise"

    def between(self, a: int, b: int) -> bool:
        """Does ``b`` depend on ``a`` through a third group?"""
        return any(h != a and self.reaches(h, a) for h in self.depends[b]) or self.reaches(a, b)

    def reaches(self, g: int, target: int) -> bool:
        """Does ``g`` depend on ``target``?"""
        seen: dict[int, None] = {}
        todo = [g]
        while todo:
            for h in self.depends[todo.pop()]:
                if h == target:
                    return True
                if h not in seen:
                    seen[h] = None
                    todo.append(h)
        return False

    def join_siblings(self) -> None:
        for b in list(self.groups):
            for a in list(self.groups):
                if a >= b or a not in self.groups or b not in self.groups or not self.share(a, b):
                    continue
                if not self.reaches(b, a) and not self.reaches(a, b):
                    self.try_join(a, b)

    def share(self, a: int, b: int) -> bool:
        """Do they read one tensor of two axes or more, or of as many as any of theirs?

        A weight beside wider tensors is not worth a kernel that does two things.
        """
        one, other = self.segment_of(self.groups[a]), self.segment_of(self.groups[b])
        widest = max(map(_axes, (*one.inputs, *one.outputs, *other.inputs, *other.outputs)))
        mine = dict.fromkeys(t for t in one.inputs if _axes(t) >= min(widest, 2))
        return any(t in mine for t in other.inputs)

    def in_order(self, groups: Sequence[int]) -> list[int]:
        done: dict[int, None] = {}

        def visit(g: int) -> None:
            if g in done:
                return
            for h in sorted(self.depends[g]):
                visit(h)
            done[g] = None

        for g in sorted(groups):
            visit(g)
        return list(done)
