"""A generated kernel: its text, and what a launch hands over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..ir.dtype import DataType
from ..ir.expr import BoundTensor
from ..ir.scalar import Scalar
from ..schedulers.schedule import Schedule

_OF_DENORMALS = (
    *("tl.log(", "tl.log2(", "libdevice.atan2(", "libdevice.erfcinv(", "libdevice.fmod(", "libdevice.lgamma("),
    *("libdevice.nextafter(", "libdevice.pow("),
)
"""Functions of float32 whose result is another one altogether where an operand below 1.2e-38 is taken for 0."""


@dataclass(frozen=True)
class KernelSource:
    """Triton text with the function ``name``, whose arguments are ``tensors``, ``scalars``, ``integers`` in that order.

    ``integers``: this rank's extents and starts; no part of the text, so that another batch size needs no compile.
    ``grid``: number of programs.  ``text`` is a file that runs if pasted.  ``mailbox``: 64-bit words of memory, zeroed
    once and kept between launches, whose pointer is the first argument.  ``is_cooperative``: do programs wait for each
    other, so that all must run at once?  ``schedule``: that of the plan, or of its first stage, with the access
    that the strides of this rank allow; ``None`` of a text that no plan was made for.  ``contracts``: may the compiler
    make a product and a sum one operation with one rounding, wherever it finds the two side by side?
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

    @property
    def keeps_denormals(self) -> bool:
        """Is CUDA's math library to take float32's denormals as they are?

        Triton's default takes them for 0, which saves ``exp2`` and ``rsqrt`` three instructions each.
        """
        return any(function in self.text for function in _OF_DENORMALS)


@dataclass(frozen=True)
class Parts:
    """What a kernel's text is put together from.  ``lines``: of the body; ``integers``: name to value and type.

    ``x_block``: kept elements of a block.
    """

    name: str
    comments: str
    helpers: Mapping[str, str]
    parameters: tuple[str, ...]
    not_specialised: tuple[str, ...]
    lines: tuple[str, ...]
    scalars: tuple[Scalar, ...]
    integers: Mapping[str, tuple[int, str]]
    grid: int
    num_warps: int
    num_stages: int
    max_registers: int | None
    mailbox: int
    x_block: int
    schedule: Schedule


MARGIN = 120
"""Characters of a line of generated text, at most, as of this package's."""


class Writer:
    """Lines of Python, with indentation and single blank lines between paragraphs."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 1

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def paragraph(self) -> None:
        if self.lines and self.lines[-1]:
            self.lines.append("")

    def text(self) -> str:
        while self.lines and not self.lines[-1]:
            self.lines.pop()
        return "\n".join(self.lines) + "\n"


def body_text(comments: str, helpers: Mapping[str, str]) -> str:
    """What stands above a kernel's function: the IR in comments, imports, and the functions that it calls."""
    imports = "import triton\nimport triton.language as tl\n" + helpers.get("libdevice", "")
    functions = "".join(f"{text}\n\n" for name, text in helpers.items() if name != "libdevice")
    return f"{comments}\n{imports}\n\n{functions}"


def signature(name: str, parameters: list[str], not_specialised: list[str]) -> str:
    """``def`` with its decorator, broken over lines as the formatter breaks them."""
    quoted = ", ".join(f'"{p}"' for p in not_specialised)
    decorator = f"@triton.jit(do_not_specialize=[{quoted}])" if quoted else "@triton.jit"
    joined = ", ".join(parameters)
    if len(f"def {name}({joined}):") <= MARGIN:
        return f"{decorator}\ndef {name}({joined}):\n"
    if len(joined) + 4 <= MARGIN:
        return f"{decorator}\ndef {name}(\n    {joined}\n):\n"
    listed = "".join(f"    {p},\n" for p in parameters)
    return f"{decorator}\ndef {name}(\n{listed}):\n"


def call_of(target: str, name: str, arguments: Sequence[str], depth: int) -> list[str]:
    """``target = name(arguments)``, which will stand at ``depth``, broken over lines as the formatter breaks it."""
    joined, margin = ", ".join(arguments), MARGIN - 4 * depth
    whole = f"{target} = {name}({joined})"
    if len(whole) <= margin:
        return [whole]
    listed = [f"    {joined}"] if len(joined) + 4 <= margin else [f"    {a}," for a in arguments]
    return [f"{target} = {name}(", *listed, ")"]


def tuple_of(target: str, values: Sequence[str]) -> list[str]:
    """``target = values``, one level deep, broken over lines as the formatter breaks it."""
    whole = f"    {target} = {', '.join(values)}{',' if len(values) == 1 else ''}"
    if len(whole) <= MARGIN:
        return [whole]
    return [f"    {target} = (", *(f"        {v}," for v in values), "    )"]


@dataclass(frozen=True)
class Text:
    """A value: its text, the type it is carried in, and whether it has lanes along x and along r."""

    text: str
    dtype: DataType
    has_x: bool
    has_r: bool


def in_branches(test: str, whole: Sequence[str], masked: Sequence[str]) -> list[str]:
    """Lines that run ``whole`` where a program passes ``test``, and ``masked`` in the others, at an end."""
    return ["", f"    if {test}:", *_within(whole), "    else:", *_within(masked)]


def _within(lines: Sequence[str]) -> list[str]:
    """A branch of ``lines``, without blank ones at the ends."""
    text = "\n".join(f"    {line}" if line else "" for line in lines).strip("\n")
    return text.split("\n")
