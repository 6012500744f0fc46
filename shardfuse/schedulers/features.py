"""features: the iteration space of a segment on a device, with all that a schedule is chosen by.

Each feature is worked out once, when it is first asked for.  Schedulers, the model of resources and the tuner read them
here, and look at the expressions of a segment no further.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import TypeVar

from ..device import LEAST_COPY, LINE_BYTES, Device, Measured
from ..ir.digits import extent
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor, Expr
from ..ir.layout import is_uneven
from ..ir.op import Cast, Pointwise, Random, Reduce, Set, Statistic, View, is_pointwise, is_statistic
from ..ops.reductions import REDUCTION_TABLE
from ..ops.table import POINTWISE
from ..segments.online_reductions import online, takes_one_walk
from ..segments.pair_runs import pair_runs
from ..segments.segment import Segment, leading_to
from ..segments.space import Space, analyse, as_columns, run_below, stored_atoms
from .limits import LONG_WARPS, WARP, power_of_two, vector

_DRAWN = Pointwise("philox_uniform")
_COSTLY = ("exp", "erf", "erfc", "gelu_slope", "log", "pow", "sin", "cos", "lgamma", "tanh")
"""Functions of so many instructions that to evaluate them again takes longer than to hold what they gave."""


_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Features(Space):
    """A space on ``device``.  Lengths are in elements."""

    device: Device = field(kw_only=True)

    @property
    def tuned(self) -> Measured:
        """What was measured on the device."""
        return self.device.measured

    # what is read

    @cached_property
    def width(self) -> int:
        """Elements of the widest load of what is streamed; 4 where nothing is."""
        extent = self.reduced if self.is_inner else self.kept
        return max((vector(t.dtype, extent, self.device) for t in self.streamed), default=4)

    @property
    def kept_to_fill(self) -> int:
        """Kept elements that are to fill the machine: of rows that are promised their bits as many, whatever there are.

        Rows that are too odd for wide loads take all registers of a program: for them many rows are to fill it.  Cross
        entropy of 512 x 50257, bfloat16, took 72 us on an H200 with a program a row, by groups of 2 99.
        """
        is_few = self.is_invariant and self.is_inner and not any(self.is_odd(t.dtype) for t in self.streamed)
        return min(self.kept, self.tuned.invariant_rows.few) if is_few else self.kept

    def narrowest_load(self, extent: int) -> int:
        """Bytes of the narrowest load of what is streamed, in runs of ``extent`` elements."""
        loads = (vector(t.dtype, extent, self.device) * t.dtype.itemsize for t in self.streamed)
        return min(loads, default=self.device.access_bytes)

    @property
    def is_cut_short(self) -> bool:
        """Are rows stored in pieces that the widest loads do not divide?"""
        return self.run != self.reduced and self.narrowest_load(self.run) < self.device.access_bytes

    def may_align_down(self, rows: int = 2) -> bool:
        """Are there ``rows`` rows, too odd for wide loads, that may be read in the aligned words that contain them?

        Not those of an invariant space, or whose sums are in pairs: where in a word a row begins says which thread adds
        up what of it.  Nor those whose blocks are reduced, which would begin anywhere in a tile.
        """
        is_odd = self.is_odd(self.streamed[0].dtype)
        return is_odd and self.kept >= rows and not (self.is_invariant or self.adds_in_pairs or self.block)

    def is_odd(self, dtype: DataType) -> bool:
        """Are rows of ``dtype`` too odd for loads of more than a few bytes?"""
        return vector(dtype, self.reduced, self.device) * dtype.itemsize <= LEAST_COPY

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of all that is streamed."""
        return self.reduced * self.element_bytes

    @property
    def row_lanes(self) -> int:
        """Lanes of a row whose sums are in pairs, each of which adds up ``row_parts`` elements; without such sums its
        elements."""
        return pair_runs(self.segment).lanes_of_row(self.reduced)

    @property
    def row_parts(self) -> int:
        return pair_runs(self.segment).parts_of_row(self.reduced)

    @property
    def is_padded(self) -> bool:
        """Have some lanes of a row whose sums are in pairs no element?"""
        runs = pair_runs(self.segment)
        return runs.is_padded and self.reduced >= runs.run

    def as_branch(self, chunk: int) -> int:
        """The lanes next to ``chunk`` that are a branch of the tree that such a row's sums are.

        They are at most those of one part of each run, and whole parts where the last is shorter.
        """
        least = pair_runs(self.segment).lanes if self.is_padded else 1
        return max(min(chunk, self.row_lanes), least)

    @property
    def is_narrow(self) -> bool:
        """Has all that is streamed 16 bits or fewer?"""
        return all(t.dtype.itemsize <= 2 for t in self.streamed)

    @property
    def has_windows(self) -> bool:
        """Is something read at another place than its own?"""
        return bool(self.segment.windows)

    @property
    def is_by_sample(self) -> bool:
        """Has what is beside the rows a value of its own for some of them, as a group norm's weight has?"""
        return any(map(self.has_x, self.beside))

    @cached_property
    def beside_again(self) -> int:
        """How many of the vectors beside a row are read for a reduction, and so before each and after the last."""
        wanted = [e.tensors[0] for e in self.segment.exprs if isinstance(e.op, Reduce) and not self.has_r(e.output)]
        behind = {t for e in leading_to(self.segment.exprs, wanted) for t in e.tensors}
        return len([t for t in self.beside if t in behind])

    # what is computed

    @cached_property
    def draws(self) -> bool:
        """Are random numbers made?"""
        return any(isinstance(e.op, Random) or e.op == _DRAWN for e in self.segment.exprs)

    @cached_property
    def evaluates(self) -> bool:
        """Is a costly function computed of each element of a row before the first reduction?"""
        costly = filter(is_costly, self.segment.exprs)
        return any(self.has_r(e.output) and not self.phase[e.output] for e in costly)

    @property
    def sums_slow_blocks(self) -> bool:
        """Are blocks of the row reduced of what takes a costly function, or a sigmoid, to evaluate?

        A group that reads a row ahead would evaluate it twice.  The gradient of group norm and SiLU, 32 x 128 x 256 x
        256 of float16, took 629 us on an H200 so, held 547; without SiLU 440 and 527.
        """
        slow = (e for e in self.segment.exprs if is_costly(e) or is_pointwise(e.op, "sigmoid", "silu"))
        return bool(self.block) and any(self.has_r(e.output) and not self.phase[e.output] for e in slow)

    @cached_property
    def is_variance(self) -> bool:
        """Is a mean reduced with the squares around it?"""
        return any(is_statistic(e.op, "welford") for e in self.segment.exprs)

    @cached_property
    def takes_one_walk(self) -> bool:
        """Is no element needed again once running statistics have taken it?

        What is stored of each element, and made of a reduction, is such a need however statistics are joined; but for
        an element that is picked by its index.
        """
        is_made_after = any(self.phase[t] and self.has_r(t) for t in self.segment.outputs)
        return not (is_made_after and not self.segment.has_indices) and takes_one_walk(self.segment)

    @cached_property
    def holds_elements(self) -> bool:
        """Is some element of a row, and not what its block was reduced to alone, needed again after a reduction?"""
        return any(phase and self.has_r(t) and t not in self.of_blocks for t, phase in self.phase.items())

    def reduces_rows(self, expr: Expr) -> bool:
        """Is it a reduction of all elements of a row?"""
        return self.reduces(expr) and self.atoms[expr.tensors[0]].issuperset(self.r)

    @property
    def is_chain(self) -> bool:
        """Do so many reductions follow one another that what a row waits for decides?"""
        return self.phases > self.tuned.chains.phases

    @cached_property
    def why_no_exchange(self) -> str | None:
        """Why programs cannot finish the reductions for each other: a word of an exchange holds 32 bits."""
        one_word = (DataType.Float, DataType.Int32, DataType.Bool)
        wide = (e.output for e in self.segment.exprs if self.reduces(e) and carried(e) not in one_word)
        found = next(wide, None)
        return None if found is None else f"{found} is accumulated in 64 bits, a word of an exchange holds 32"

    # what is held

    @cached_property
    def held(self) -> int:
        """How many values of each element a thread holds: what is made before the first reduction and needed after it.

        Not fewer than registers that its inputs take as they come; all inputs where indices and long chains take more.
        """
        inputs = self.streamed
        if not self.is_inner or self.is_chain or self.segment.has_indices:
            return len(inputs)
        readers = [e for e in self.segment.exprs if self.phase[e.output] and self.has_r(e.output)]
        needed = dict.fromkeys((*(t for e in readers for t in e.tensors if t in self.atoms), *self.segment.outputs))
        kept = [t for t in needed if not self.phase[t] and self.has_r(t) and self.has_x(t) and t not in self.of_blocks]
        return max(self._values_of(kept), -(-len(inputs) // 2))

    @cached_property
    def held_at_most(self) -> int:
        """How many values of each element a thread holds across the reduction of a row across which it holds most.

        What is stored counts to the end, where all stores are: of a norm of a sum, the sum and the normed row across
        the reduction that finds the largest of the normed.
        """
        known = [t for t in self.segment.tensors if t in self.atoms]  # all but what windows are of
        made = [t for t in known if self.has_r(t) and self.has_x(t) and t not in self.of_blocks]
        last = dict.fromkeys(self.segment.outputs, self.phases)
        for e in self.segment.exprs:
            last |= {t: max(last.get(t, 0), self.phase[e.output]) for t in e.tensors if self.has_r(e.output)}
        held = ([t for t in made if self.phase[t] < p <= last.get(t, 0)] for p in range(1, self.phases))
        return max(map(self._values_of, held), default=0)

    def _values_of(self, tensors: Iterable[BoundTensor]) -> int:
        """How many values an element of each of ``tensors`` takes: one that is cast or moved is not another."""
        again = {e.output: e.tensors[0] for e in self.segment.exprs if isinstance(e.op, Cast | Set | View)}
        sources: dict[BoundTensor, None] = {}
        for t in tensors:
            while t in again:
                t = again[t]
            sources[t] = None
        return len([t for t in sources if self.is_streamed(t) or t not in self.segment.loads])

    @property
    def are_few_held(self) -> bool:
        """Are rows of one input, no more than multiprocessors, read three times, and does a small group hold each?

        The same for a segment whose statistics are joined, of which two reads are one.
        """
        tuned = self.tuned.groups
        reads = self.phases + any(isinstance(e.op, Statistic) for e in self.segment.exprs)
        if self.grouped or reads <= 2 or self.kept > self.device.multiprocessors or len(self.streamed) != 1:
            return False
        return self.reduced <= tuned.few_members * LONG_WARPS * WARP * tuned.few_held

    @cached_property
    def rows_alike(self) -> int:
        """Rows, a power of two, that read the same vectors wherever their block begins.

        All where nothing tells them apart.  Two layer norms in a row with a scale and a shift for each of 8 samples, 8
        x 1023 x 5120 of bfloat16, spilled 2584 bytes in blocks of 4 rows, which two samples share.
        """
        found = power_of_two(self.kept)
        for t in self.beside:
            if self.has_x(t):
                rows = run_below(t, self.x, self)
                found = min(found, rows & -rows)
        return found

    @cached_property
    def is_turned(self) -> bool:
        """Are elements that a warp could load at once reduced ones in some of its tensors, and kept ones in others?"""
        inmost: set[bool] = set()
        whole = [t for t in (*self.segment.loads, *self.segment.outputs) if self.is_streamed(t) and self.has_r(t)]
        for t in whole:
            stored = stored_atoms(t, self.pieces)
            is_reduced, side = (True, self.r) if stored[-1] in self.r else (False, self.x)
            if extent(tuple(takewhile(side.__contains__, reversed(stored)))) >= WARP:
                inmost.add(is_reduced)
        return len(inmost) > 1

    # other ways to walk it

    @cached_property
    def joined(self) -> Features:
        """Of the segment with two reductions that are one statistic as one; those in pairs are what they are."""
        return self if self.adds_in_pairs else features(online(self.segment), self.device)

    @cached_property
    def in_columns(self) -> Features:
        """As it is walked: short runs of memory are columns side by side.

        Short is less than a line; more where no program would hold a row of an under-occupied grid, as its runs would
        be found twice.  Runs that are shorter on some rank stay runs: a group of columns has one length on all of them.
        """
        if self.grouped or self.adds_in_pairs or self.has_uneven_runs:
            return self
        is_read_twice = (
            self.kept <= self.device.multiprocessors
            and self.row_bytes > self.device.row_bytes
            and not self.are_few_held
        )
        run = self.tuned.groups.short_run if is_read_twice else LINE_BYTES
        return as_columns(self, run // self.narrowest)

    @cached_property
    def has_uneven_runs(self) -> bool:
        """Do reduced elements that follow one another in memory number fewer on some rank?"""
        parallel = {d for t in self.segment.tensors for d in t.domain.mesh_digits}
        return any(is_uneven(a, parallel) for a in self.r[len(self.r) - self.inside :])

    @cached_property
    def columns(self) -> tuple[int, int]:
        """Of columns in groups: how many a program takes, whole groups and a line of memory, and in how many lanes."""
        groups, most = self.x[-1 - self.inside].extent, self.tuned.groups.widest_columns
        counts = (n for n in range(1, groups + 1) if groups % n == 0)
        sizes = [n * self.grouped for n in counts if n * self.grouped <= most]
        whole = [n for n in sizes if n * self.narrowest >= LINE_BYTES] or sizes[-1:]
        best = max(whole, key=lambda n: (n / power_of_two(n), -n))
        return best, power_of_two(best)


def on(space: Space, device: Device) -> Features:
    """``space`` on ``device``."""
    own = {part.name: vars(space)[part.name] for part in fields(space)}
    return Features(**own, device=device)


@lru_cache(maxsize=64)  # every scheduler asks about the same segment in turn
def features_or_refusal(segment: Segment, device: Device) -> Features | str:
    """The features of ``segment``, or why no single kernel can walk it."""
    space = analyse(segment)
    return space if isinstance(space, str) else on(space, device)


def reduction_or_refusal(segment: Segment, device: Device) -> Features | str:
    """The same; a segment that reduces nothing, or blocks of rows, which no loop has, has none either."""
    space = features_or_refusal(segment, device)
    if isinstance(space, str):
        return space
    if not space.r:
        return "it has no reduction"
    if space.adds_in_pairs:
        return "its sums are in pairs, for which a program holds a row"
    return f"blocks of {space.block_size} elements are of rows that are held" if space.block else space


def features(segment: Segment, device: Device) -> Features:
    """The features of a segment that has a space."""
    return accepted(features_or_refusal(segment, device))


def accepted(found: _Found | str) -> _Found:
    """What was found of a segment that a scheduler took: no refusal."""
    assert not isinstance(found, str), found
    return found


def is_costly(expr: Expr) -> bool:
    """Does it take longer to evaluate ``expr`` again than to hold what it gave?  Some numbers make it cheap."""
    return is_pointwise(expr.op, *_COSTLY) and POINTWISE[expr.op.name].by_its_number(expr.inputs) is None


def carried(expr: Expr) -> DataType:
    """The type that the reduction ``expr`` accumulates in."""
    assert isinstance(expr.op, Reduce), f"{expr.op.name} is no reduction"
    return REDUCTION_TABLE[expr.op.kind].carried(expr.tensors[0].dtype, expr.output.dtype)


def itemsizes(tensors: Iterable[BoundTensor]) -> int:
    """Bytes of one element of each of ``tensors``."""
    return sum(t.dtype.itemsize for t in tensors)
