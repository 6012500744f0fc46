"""The TensorView of a definition: logical, loop and allocation axes over a device mesh, sizes still symbolic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..arguments import checked
from ..base_error import shown
from ..errors import AxisError, ScheduleError
from ..mesh import DeviceMesh, ParallelType
from ..source_line import SourceLine, caller_line
from .domain import IterDomain, Merge, Split, TensorDomain
from .dtype import DataType
from .without_value import WithoutValue


def _refused(method: str, argument: str, found: object, expected: str) -> ScheduleError:
    return ScheduleError(method, f"{argument}={shown(found)}", f"{argument} is not {expected}", f"pass {expected}")


@checked(_refused, ("parallelize",))
class Axis:
    """A handle on one loop axis of a TensorView, as ``tv.axis(i)`` returns it."""

    def __init__(self, tv: TensorView, domain: IterDomain) -> None:
        self.tv = tv
        self.domain = domain

    @property
    def extent(self) -> int:
        """Number of elements before sharding; -1 where symbolic."""
        return self.domain.extent

    @property
    def is_reduction(self) -> bool:
        return self.domain.is_reduction

    @property
    def parallel_type(self) -> ParallelType:
        return self.tv.domain.parallel.get(self.domain, ParallelType.serial)

    def parallelize(self, parallel_type: ParallelType) -> None:
        """Give this axis to a mesh dimension (or to ``stream``, or back to ``serial``).

        Raises ``ScheduleError`` where another axis of the TensorView has that mesh dimension already.
        """
        taken = self.tv.domain.mesh_axes().get(parallel_type)
        if taken is not None and taken is not self.domain and not self.domain.is_reduction:
            raise ScheduleError(
                f"axis {self.domain} of {self.tv.name}",
                f"parallelize({parallel_type.name})",
                f"{parallel_type.name} is already taken by axis {taken}",
                "one mesh dimension holds one axis; merge the two first or use another mesh dimension",
            )
        self.tv.reschedule("parallelize", parallel={**self.tv.domain.parallel, self.domain: parallel_type})

    def __repr__(self) -> str:
        return repr(self.domain)


@checked(
    _refused,
    (
        "axis",
        "split",
        "outer_split",
        "inner_split",
        "merge",
        "reorder",
        "swizzle1d",
        "set_device_mesh",
        "set_allocation_domain",
    ),
)
class TensorView(WithoutValue):
    """A tensor of a fusion definition.

    ``shape``: unsharded sizes, -1 where symbolic.  The schedule methods (``split``, ``merge``, ``reorder``,
    ``axis(i).parallelize``, ``swizzle1d``, ``set_device_mesh``, ``set_allocation_domain``) work on loop axes, as in
    nvFuser.
    """

    def __init__(self, name: str, shape: Sequence[int], dtype: DataType, *, is_cpu: bool = False) -> None:
        self.name = name
        self.dtype = dtype
        self.shape = tuple(shape)
        self.is_cpu = is_cpu
        self.allocation_rank = False
        """Are tensors handed over with one dim per allocation axis (a mesh axis is 1) rather than per logical axis?"""
        self.is_closed = False
        """Has the fusion been run?  Its plans hold for the shardings and layouts that were said until then."""
        logical = tuple(IterDomain(f"i{k}", n) for k, n in enumerate(shape))
        self.domain = TensorDomain(logical, logical)
        self.line = caller_line()
        """Of the caller's program, where the tensor was made."""
        self.schedule_lines: tuple[SourceLine, ...] = ()
        """Where its mesh, splits and storage were said, in order."""

    @property
    def ndim(self) -> int:
        """Number of logical axes."""
        return len(self.domain.logical)

    def axis(self, index: int) -> Axis:
        """The loop axis at ``index`` (negative from the end).  Raises ``AxisError``."""
        return Axis(self, self.domain.loop[self._loop_index(index)])

    def split(self, axis: int, factor: int, inner_split: bool = True, *, uneven: bool = False) -> TensorView:
        """Cut loop axis ``axis`` in two; ``factor`` is the inner part's extent (outer's with ``inner_split=False``).

        ``uneven=True`` cuts as ``torch.chunk`` does: the last outer index may be short or missing.
        """
        at = self._loop_index(axis)
        if factor < 1:
            raise ScheduleError(f"{self.name}.split", f"factor={factor}", "it is below 1", "give a factor of 1 or more")
        old = self.domain.loop[at]
        other = -1 if old.extent < 0 else -(-old.extent // factor)
        if old.extent >= 0 and old.extent % factor and not uneven:
            raise ScheduleError(
                f"{self.name}.split",
                f"axis {old} of extent {old.extent}, factor {factor}",
                f"{factor} does not divide {old.extent}",
                f"pad the axis to {other * factor}, or allow short shards with uneven=True{self._mesh_text()}",
            )
        sizes = (other, factor) if inner_split else (factor, other)
        outer, inner = (IterDomain(f"{old}{k}", n, old.is_reduction) for k, n in zip("oi", sizes, strict=True))
        loop = (*self.domain.loop[:at], outer, inner, *self.domain.loop[at + 1 :])
        cut = Split(old, factor, inner_split, uneven, (outer, inner))
        self.reschedule("split", loop=loop, transforms=(*self.domain.transforms, cut))
        return self

    def _mesh_text(self) -> str:
        mesh = self.domain.mesh
        if mesh is None:
            return ""
        return "; its mesh has " + ", ".join(f"{mesh.extent(p)} ranks on {p}" for p in mesh.parallel_types)

    def outer_split(self, axis: int, factor: int, *, uneven: bool = False) -> TensorView:
        """Cut loop axis ``axis`` so that its outer part has extent ``factor``."""
        return self.split(axis, factor, inner_split=False, uneven=uneven)

    def inner_split(self, axis: int, factor: int, *, uneven: bool = False) -> TensorView:
        """Cut loop axis ``axis`` so that its inner part has extent ``factor``."""
        return self.split(axis, factor, inner_split=True, uneven=uneven)

    def merge(self, outer: int, inner: int | None = None) -> TensorView:
        """Make one loop axis of ``outer`` and the one after it (or ``inner``), which takes the place of ``outer``."""
        first = self._loop_index(outer)
        second = first + 1 if inner is None else self._loop_index(inner)
        if second >= len(self.domain.loop):
            raise AxisError(self.name, "loop", second, len(self.domain.loop))
        if second == first:
            raise ScheduleError(
                f"{self.name}.merge", f"axis {self.domain.loop[first]} with itself", "a merge is of two axes",
                "name two different ones",
            )  # fmt: skip
        a, b = self.domain.loop[first], self.domain.loop[second]
        if a.is_reduction != b.is_reduction:
            raise ScheduleError(
                f"{self.name}.merge", f"axes {a} and {b}", "one of the two is reduced", "merge axes of one kind"
            )
        joined = IterDomain(
            f"{a}{b}", -1 if min(a.extent, b.extent) < 0 else a.extent * b.extent, is_reduction=a.is_reduction
        )
        loop = tuple(joined if i is a else i for i in self.domain.loop if i is not b)
        self.reschedule("merge", loop=loop, transforms=(*self.domain.transforms, Merge((a, b), joined)))
        return self

    def reorder(self, moves: Mapping[int, int] | Sequence[int]) -> TensorView:
        """Move loop axes: ``{old: new}``, the others keep their order; or a whole permutation of old positions."""
        n = len(self.domain.loop)
        pairs = list(moves.items() if isinstance(moves, Mapping) else ((old, new) for new, old in enumerate(moves)))
        placed = {self._loop_index(new): self._loop_index(old) for old, new in pairs}
        rest = iter([k for k in range(n) if k not in placed.values()])
        order = [placed[k] if k in placed else next(rest, -1) for k in range(n)]
        if len(placed) != len(pairs) or sorted(order) != list(range(n)):
            raise ScheduleError(f"{self.name}.reorder", repr(moves), "two axes go to one place", "give a permutation")
        self.reschedule("reorder", loop=tuple(self.domain.loop[k] for k in order))
        return self

    def swizzle1d(self, axis: int, parallel_type: ParallelType) -> TensorView:
        """Let each rank take the chunks of loop axis ``axis``, which is parallel on ``stream``, in a ring from its own.

        With d chunks and d ranks on ``parallel_type``, rank r takes chunk (r + i) mod d at stage i.  Where the chunks
        are the ranks' pieces, a gather begins without communication, and d - 1 sends around the ring follow.
        Raises ``AxisError`` and, where ``parallel_type`` is no mesh dimension, ``ScheduleError``.
        """
        chosen = self.domain.loop[self._loop_index(axis)]
        if not parallel_type.is_mesh:
            raise ScheduleError(
                f"{self.name}.swizzle1d",
                f"parallel_type={parallel_type.name}",
                "the ranks of a mesh dimension make the ring",
                "name a mesh dimension, mesh_x say",
            )
        self.reschedule("swizzle1d", swizzles={**self.domain.swizzles, chosen: parallel_type})
        return self

    def set_device_mesh(self, mesh: DeviceMesh) -> None:
        """Put the tensor on ``mesh``; replicated, until an axis is parallelised on one of its dimensions."""
        self.reschedule("set_device_mesh", mesh=mesh)

    def has_device_mesh(self) -> bool:
        return self.domain.mesh is not None

    def set_allocation_domain(
        self, axes: Sequence[Axis | IterDomain], contiguity: bool | Sequence[bool | None] = True
    ) -> None:
        """Store the tensor with ``axes`` (of the logical or loop domain, or between) outermost first.

        ``contiguity``: for each axis, whether it is laid out without a gap before the next.
        Raises ``ScheduleError`` for axes of another tensor, and where they do not hold each element once.
        """
        order = tuple(a.domain if isinstance(a, Axis) else a for a in axes)
        flags = (contiguity,) * len(order) if isinstance(contiguity, bool) else tuple(contiguity)
        if len(flags) != len(order):
            raise ScheduleError(
                f"{self.name}.set_allocation_domain", f"{len(flags)} contiguity flags", f"there are {len(order)} axes",
                "give one flag for each axis, or a single bool",
            )  # fmt: skip
        other = next((a.tv for a in axes if isinstance(a, Axis) and a.tv is not self), self)
        if other is not self or (order and not self.domain.is_whole(order)):
            own = ", ".join(map(str, self.domain.loop))
            raise ScheduleError(
                f"{self.name}.set_allocation_domain", f"[{', '.join(map(str, order))}]",
                f"not all of {self.name} is there, each once" if other is self else f"these are axes of {other.name}",
                f"name those of its logical domain or of its loop domain, which is [{own}], in any order",
            )  # fmt: skip
        self.reschedule("set_allocation_domain", allocation=order, contiguity=flags)

    def show_reduced(self, axes: Sequence[tuple[int, int]]) -> None:
        """Let reduction axes stand in the loop domain, as nvFuser's do: (place, extent) of each, in ascending order."""
        shown = tuple((place, IterDomain(f"r{place}", n, is_reduction=True)) for place, n in axes)
        loop = list(self.domain.loop)
        for place, axis in shown:
            loop.insert(place, axis)
        self.reschedule("rfactor", loop=tuple(loop), reduced=shown)

    def get_logical_domain(self) -> list[Axis]:
        return [Axis(self, i) for i in self.domain.logical]

    def get_loop_domain(self) -> list[Axis]:
        return [Axis(self, i) for i in self.domain.loop]

    def get_allocation_domain(self) -> list[Axis]:
        return [Axis(self, i) for i in self.domain.allocation or self.domain.logical]

    def reschedule(self, method: str, **changes: Any) -> None:
        """Swap the domain for one with these fields changed by ``method``, and remember who asked.

        What ``outer_split``, ``parallelize`` and the others are made of: a program calls those.
        Raises ``ScheduleError`` once the fusion has been run.
        """
        if self.is_closed:
            raise ScheduleError(
                f"{self.name}.{method}", "a change of sharding or layout", "the fusion has been run as it was",
                "say all of it before the first run, or define the fusion anew",
            )  # fmt: skip
        self.domain = replace(self.domain, **changes)
        line = caller_line()
        if line is not None and line not in self.schedule_lines:
            self.schedule_lines = (*self.schedule_lines, line)

    def _loop_index(self, index: int) -> int:
        n = len(self.domain.loop)
        if not -n <= index < n:
            raise AxisError(self.name, "loop", index, n)
        return index % n

    def __repr__(self) -> str:
        axes = ", ".join(
            f"{i}{'' if i.extent < 0 else '{' + str(i.extent) + '}'}"
            + (f"@{self.domain.parallel[i].name}" if i in self.domain.parallel else "")
            for i in self.domain.loop
        )
        return f"{self.name}[{axes}]:{self.dtype.name}"
