"""What was done: each region that was looked at, in this process, taken or not and why."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING

from ..frontend.profiled import counted

if TYPE_CHECKING:
    from torch.fx import Graph

    from ..frontend.explain import Explanation

MOST = 4096
"""Regions that are remembered."""
DETAILED = 256
"""The last regions are remembered with their plan and graph, about 100 KiB each where a graph's tensors are shared."""

_COLLECTIVES = ("all_reduce_", "reduce_scatter_", "all_gather")
"""How names of collectives begin in a program (`aten_collectives.py`)."""
_PLACES = 2
"""Lines that a region's name has room for."""
FROM_CACHE = -1
"""Stands for the number of a graph of which no more is known than that torch's cache had it."""


@dataclass(frozen=True)
class RegionReport:
    """One region.  Bytes and microseconds are at the sizes of the call for which its graph was made.

    ``graph``: "forward", "backward" or "cached", where torch's cache had the compiled graph.  ``ops``: how often each
    op is in it.  ``bytes``, ``kernels``: of shardfuse's plan.  ``us``: expected of that plan; ``inductor_us``: of
    Inductor's kernels.  ``why``: one sentence.  ``lines``: of the caller's program.  ``program``: the definition.
    ``measured_us``, ``measured_inductor_us``: of both alone, where the report was asked to measure.  ``of``: the graph,
    counted in this process; ``number``: of the region in it; ``behind``: those on whose results it rests, the nearest.
    ``collectives``: of the graph, inside of the region or next to it, and then why; of a cached one those inside alone.
    ``plan``, ``alone``, the region as a graph: of the last ``DETAILED`` regions, those that are drawn and measured.
    """

    graph: str
    ops: tuple[tuple[str, int], ...]
    inputs: int
    outputs: int
    bytes: int | None
    kernels: int | None
    us: float | None
    inductor_us: float | None
    taken: bool
    why: str
    lines: tuple[str, ...]
    program: str
    measured_us: float | None = None
    measured_inductor_us: float | None = None
    of: int = 0
    number: int = 0
    behind: tuple[int, ...] = ()
    collectives: tuple[str, ...] = ()
    plan: Explanation | None = field(default=None, repr=False, compare=False)
    alone: Graph | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        names = counted(self.ops)
        head = f"{self.graph}: {'taken' if self.taken else 'left to Inductor'}: {self.why}"
        text = [head, f"    {sum(n for _, n in self.ops)} ops ({names}), {self.inputs} in, {self.outputs} out"]
        if self.bytes is not None and self.us is not None and self.inductor_us is not None:
            cost = f"{self.kernels} kernels, {self.bytes} bytes, {self.us:.1f} us expected"
            text.append(f"    {cost}; Inductor {self.inductor_us:.1f} us")
        if self.measured_us is not None and self.measured_inductor_us is not None:
            text.append(f"    measured alone {self.measured_us:.1f} us; Inductor {self.measured_inductor_us:.1f} us")
        return "\n".join([*text, *(f"    {line}" for line in (*self.collectives, *self.lines))])


@dataclass(frozen=True)
class Report:
    """The regions of all graphs that were compiled in this process; prints as text."""

    regions: tuple[RegionReport, ...]

    @property
    def taken(self) -> tuple[RegionReport, ...]:
        return tuple(r for r in self.regions if r.taken)

    def __str__(self) -> str:
        head = f"{len(self.regions)} regions, {len(self.taken)} taken"
        return "\n".join([head, *map(str, self.regions)])


_regions: deque[RegionReport] = deque(maxlen=MOST)
_lock = Lock()


def note(found: Iterable[RegionReport]) -> None:
    """Remember what was found in a graph."""
    with _lock:
        added = list(found)
        _regions.extend(added)
        detailed = len(_regions) - DETAILED
        for k in range(max(detailed - len(added), 0), detailed):
            _regions[k] = replace(_regions[k], plan=None, alone=None)


def note_cached(program: str, ops: Iterable[str], inputs: int, outputs: int) -> None:
    """Remember a region of a graph that torch's cache had: its program is read for the first time.

    Nothing where its graph was compiled in this process.
    """
    with _lock:
        if any(r.program == program for r in _regions):
            return
        counted = Counter(ops)
        inside = [f"{name}: inside" for name, n in counted.items() for _ in range(n) if name.startswith(_COLLECTIVES)]
        why = "its graph came from torch's cache"
        number = sum(r.of == FROM_CACHE for r in _regions)
        found = RegionReport(
            "cached",
            tuple(sorted(counted.items())),
            inputs,
            outputs,
            None,
            None,
            None,
            None,
            True,
            why,
            (),
            program,
            of=FROM_CACHE,
            number=number,
            collectives=tuple(inside),
        )
        _regions.append(found)


_OPS = re.compile(r"fd\.ops\.(\w+)\(")
_noted: set[str] = set()
"""Texts of programs that were run since the report was last cleared: each is looked up once among the regions."""


def note_cached_text(program: str) -> None:
    """As ``note_cached``, of a program's text, which says its ops; looked up when it runs for the first time."""
    if program not in _noted:
        if len(_noted) >= MOST:
            _noted.clear()
        note_cached(program, _OPS.findall(program), program.count("fd.define_"), program.count("fd.add_output("))
        _noted.add(program)


def place_of(program: str) -> str:
    """`` at model.py:31 (backward)``: the caller's lines that its ops come from; empty for a graph of torch's cache.

    Places whose regions have one text share a program: it is the first one's.
    """
    with _lock:
        found = next((r for r in _regions if r.program == program and r.lines), None)
    if found is None:
        return ""
    lines = dict.fromkeys(line.partition(": ")[0] for line in found.lines)
    return f" at {', '.join(list(lines)[:_PLACES])} ({found.graph})"


def report(*, clear: bool = False) -> Report:
    """Every region that the pass has looked at in this process, in order; ``clear`` forgets them."""
    with _lock:
        found = Report(tuple(_regions))
        if clear:
            _regions.clear()
            _noted.clear()
    return found
