"""A generated kernel: its text, and what a launch hands over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..ir.dtype import DataType
from ..ir.expr import BoundTensor
from ..ir.scalar import Scalar
from ..schedulers.schedule import Schedule
from .statements import Statement, function_text

PROGRAM = "tl.program_id(0)"
"""Which block the kernel of a launch computes."""
BLOCK = "block"
"""Which block the function of a later stage of a launch computes: its last parameter."""
MAILBOX = "mailbox_ptr"
"""The first argument of a kernel whose programs or ranks wait for each other."""

_OF_DENORMALS = (
    *("tl.log(", "tl.log2(", "libdevice.atan2(", "libdevice.erfcinv(", "libdevice.fmod(", "libdevice.lgamma("),
    *("libdevice.nextafter(", "libdevice.pow("),
)
"""Functions of float32 whose result is another one altogether where an operand below 1.2e-38 is taken for 0."""


@dataclass(frozen=True)
class MemoryAccess:
    """A load, a store or a prefetch of the memory of ``tensor`` at ``pointer``, which is text.

    ``is_whole``: by programs that need no mask, which take a branch of their own.
    """

    kind: Literal["load", "store", "prefetch"]
    tensor: BoundTensor
    pointer: str
    is_whole: bool = False

    @property
    def place(self) -> str:
        """Where it is in the tensor, as text."""
        return self.pointer.removeprefix(f"{self.tensor}_ptr")


@dataclass(frozen=True)
class KernelSource:
    """Triton text with the function ``name``, whose arguments are ``tensors``, ``scalars``, ``integers`` in that order.

    ``integers``: this rank's extents and starts; no part of the text, so that another batch size needs no compile.
    ``grid``: number of programs.  ``text`` is a file that runs if pasted.  ``mailbox``: 64-bit words of memory, zeroed
    once and kept between launches, whose pointer is the first argument.  ``is_cooperative``: do programs wait for each
    other, so that all must run at once?  ``schedule``: that of the plan, or of its first stage, with the access
    that the strides of this rank allow; ``None`` of a text that no plan was made for.  ``contracts``: may the compiler
    make a product and a sum one operation with one rounding, wherever it finds the two side by side?  ``accesses``: of
    each stage, in the order of its text; none of a text that no plan was made for.
    """

    name: str
    text: str = field(repr=False)
    tensors: tuple[BoundTensor, ...]
    scalars: tuple[Scalar, ...]
    integers: tuple[int, ...]
    grid: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    mailbox: int = 0
    is_cooperative: bool = False
    schedule: Schedule | None = field(default=None, kw_only=True)
    contracts: bool = field(default=True, kw_only=True)
    accesses: tuple[tuple[MemoryAccess, ...], ...] = field(default=(), kw_only=True, repr=False)

    @property
    def keeps_denormals(self) -> bool:
        """Is CUDA's math library to take float32's denormals as they are?

        Triton's default takes them for 0, which saves ``exp2`` and ``rsqrt`` three instructions each.
        """
        return any(function in self.text for function in _OF_DENORMALS)


@dataclass(frozen=True)
class Kernel:
    """What a kernel's text is put together from.  ``integers``: name to value and type; the rest as ``KernelSource``'s.

    ``x_block``: kept elements of a block.
    """

    name: str
    comments: str
    helpers: Mapping[str, str]
    tensors: tuple[BoundTensor, ...]
    scalars: tuple[Scalar, ...]
    integers: Mapping[str, tuple[int, str]]
    body: Sequence[Statement]
    grid: int
    schedule: Schedule
    x_block: int
    mailbox: int
    is_cooperative: bool
    accesses: tuple[tuple[MemoryAccess, ...], ...]

    @property
    def pointers(self) -> list[str]:
        return [f"{t}_ptr" for t in self.tensors]

    @property
    def parameters(self) -> dict[str, str]:
        """By name, with the types of numbers."""
        numbers = {s.name: "tl.float64" if s.dtype.is_floating else "tl.int64" for s in self.scalars}
        pointers = dict.fromkeys([*([MAILBOX] if self.mailbox else []), *self.pointers], "")
        return pointers | numbers | {name: kind for name, (_, kind) in self.integers.items()}

    def function(self, *more: str, not_specialised: Sequence[str] = ()) -> str:
        """Its text, with ``more`` parameters."""
        given = [f"{name}: {kind}" if kind else name for name, kind in self.parameters.items()]
        return function_text(self.name, [*given, *more], self.body, not_specialised=not_specialised)

    def source(self, *, contracts: bool) -> KernelSource:
        """The file: the IR in comments, imports, the functions that the kernel calls, and its own."""
        imports = "import triton\nimport triton.language as tl\n" + self.helpers.get("libdevice", "")
        functions = "".join(f"{text}\n\n" for name, text in self.helpers.items() if name != "libdevice")
        not_specialised = [*(s.name for s in self.scalars if not s.dtype.is_floating), *self.integers]
        text = f"{self.comments}\n{imports}\n\n{functions}{self.function(not_specialised=not_specialised)}"
        launch = self.schedule.launch
        return KernelSource(
            self.name, text, self.tensors, self.scalars, tuple(value for value, _ in self.integers.values()),
            self.grid, launch.warps, launch.stages, launch.registers, self.mailbox, self.is_cooperative,
            schedule=self.schedule, contracts=contracts, accesses=self.accesses,
        )  # fmt: skip


@dataclass(frozen=True)
class Text:
    """A value: its text, the type it is carried in, and whether it has lanes along x and along r.

    of_blocks: one for each block of r, not for each element.
    """

    text: str
    dtype: DataType
    has_x: bool
    has_r: bool
    of_blocks: bool = False
