"""The steps of a host program: each is one line of its text, and knows which names it defines and which it uses.

What reuses storage, joins launches and frees tensors makes one list of steps of another (``storage.py``,
``stream_chunks.py``, ``batches.py``).  Text is printed of the steps that are left, and never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch

from ..ir.expr import BoundTensor
from .kernel import Kernel, Launch

Function: TypeAlias = Callable[..., object]
Argument: TypeAlias = str | tuple[str, ...]
"""A name, Python's text of a number, or names that are handed over as one tuple."""

STREAM, QUEUE = "stream", "queue"
"""Handles of the current stream: kernels are launched with the first, collectives take the second."""


class Step:
    """One line of a host program."""

    @property
    def defines(self) -> tuple[str, ...]:
        """The names that it assigns."""
        return ()

    @property
    def uses(self) -> tuple[str, ...]:
        """The names that it reads, and texts of numbers among them."""
        return ()

    @property
    def calls(self) -> Mapping[str, object]:
        """What names in its text stand for that neither a step defines nor ``device_calls`` (``host_program.py``)."""
        return {}

    @property
    def is_sending(self) -> bool:
        """Does it send other ranks anything, for which they wait?"""
        return False

    def __str__(self) -> str:
        raise NotImplementedError

    def mentions(self, name: str) -> bool:
        return name in self.defines or name in self.uses


@dataclass(frozen=True)
class Guard(Step):
    """Where another device is the current one, the program begins anew with its own.  index: of its own."""

    index: int
    inputs: tuple[str, ...]

    @property
    def uses(self) -> tuple[str, ...]:
        return self.inputs

    def __str__(self) -> str:
        return f"if current_device() != {self.index}: return on_device({', '.join(['program', *self.inputs])})"


@dataclass(frozen=True)
class Allocate(Step):
    """New storage.  own: an input whose storage is taken instead in calls in which no other input shares it."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    own: str = ""

    @classmethod
    def like(cls, name: str, layout: torch.Tensor, own: str = "") -> Allocate:
        return cls(name, tuple(layout.shape), layout.stride(), layout.dtype, own)

    @property
    def defines(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def uses(self) -> tuple[str, ...]:
        return (self.own, f"own_{self.own}") if self.own else ()

    @property
    def calls(self) -> Mapping[str, object]:
        return {self._dtype: self.dtype}

    @property
    def _dtype(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        first = f"{self.own} if own_{self.own} else " if self.own else ""
        return f"{self.name} = {first}empty({self.shape}, {self.strides}, {self._dtype})"


@dataclass(frozen=True)
class _Derived(Step):
    name: str
    of: str

    @property
    def defines(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def uses(self) -> tuple[str, ...]:
        return (self.of,)


@dataclass(frozen=True)
class Over(_Derived):
    """A tensor in the memory of the input ``of``, which the caller gives up."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} = over({self.of}, {self.shape}, {self.strides})"


@dataclass(frozen=True)
class Address(_Derived):
    """Where the tensor ``of`` begins; or ``offset`` bytes behind ``of``, which is an address."""

    offset: int | None = None

    def __str__(self) -> str:
        return f"{self.name} = {self.of}" + (".data_ptr()" if self.offset is None else f" + {self.offset}")


@dataclass(frozen=True)
class Cut(Step):
    """Views of ``whole``, which ``cut`` gives in order.  offsets: how many bytes are before each of them."""

    parts: tuple[str, ...]
    whole: str
    cut: Function
    offsets: tuple[int, ...]

    @property
    def defines(self) -> tuple[str, ...]:
        return self.parts

    @property
    def uses(self) -> tuple[str, ...]:
        return (self.whole,)

    @property
    def calls(self) -> Mapping[str, object]:
        return {f"chunks_{self.whole}": self.cut}

    def __str__(self) -> str:
        return f"{', '.join(self.parts)} = chunks_{self.whole}({self.whole})"


@dataclass(frozen=True)
class Rename(_Derived):
    """A name for what ``of`` is, for what its method gives, as in ``contiguous()``, or for ``None``."""

    method: str = ""

    def __str__(self) -> str:
        return f"{self.name} = {self.of}{'.' if self.method else ''}{self.method}"


@dataclass(frozen=True)
class Bring(_Derived):
    """An input that comes on the CPU, on the program's device."""

    home: torch.device

    @property
    def calls(self) -> Mapping[str, object]:
        return {"home": self.home}

    def __str__(self) -> str:
        return f"{self.name} = {self.of}.to(home)"


@dataclass(frozen=True)
class Call(Step):
    """A function of tensors and numbers that the host runs.

    results: names of what it gives.  function: ``None`` where the name is one of `device_calls`.  label: what runs on
    the device, where something does.  gives_list: are the results in a list even where it is one alone?  sends: does
    it send other ranks anything?
    """

    results: tuple[str, ...]
    name: str
    function: Function | None = None
    arguments: tuple[Argument, ...] = ()
    label: str = ""
    gives_list: bool = False
    sends: bool = False

    @property
    def defines(self) -> tuple[str, ...]:
        return self.results

    @property
    def is_sending(self) -> bool:
        return self.sends

    @property
    def uses(self) -> tuple[str, ...]:
        return tuple(name for a in self.arguments for name in ((a,) if isinstance(a, str) else a))

    @property
    def calls(self) -> Mapping[str, object]:
        return {} if self.function is None else {self.name: self.function}

    def __str__(self) -> str:
        given = (a if isinstance(a, str) else f"({' '.join(f'{name},' for name in a)})" for a in self.arguments)
        results = ", ".join(self.results) + (", = " if self.gives_list else " = ") if self.results else ""
        return f"{results}{self.name}({', '.join(given)})"


BEGIN, QUEUE_NOW = Call((STREAM,), "begin"), Call((QUEUE,), "queue_now")


@dataclass(frozen=True)
class Start(Step):
    """A collective that begins on the communication stream (``streams.py``).  done: what is waited for."""

    collective: Call
    done: str

    @property
    def defines(self) -> tuple[str, ...]:
        return (*self.collective.results, self.done)

    @property
    def is_sending(self) -> bool:
        return True

    @property
    def uses(self) -> tuple[str, ...]:
        return self.collective.uses

    @property
    def calls(self) -> Mapping[str, object]:
        return self.collective.calls

    def __str__(self) -> str:
        return f"{', '.join(self.defines)} = start({', '.join((self.collective.name, *self.uses))})"


@dataclass(frozen=True)
class Issue(Step):
    """What goes to the current stream, without a result.  An address stands for a tensor as well."""

    name: str
    function: Launch
    arguments: tuple[str, ...]
    label: str = ""
    handle: ClassVar[str] = STREAM

    @property
    def uses(self) -> tuple[str, ...]:
        return (self.handle, *self.arguments)

    @property
    def calls(self) -> Mapping[str, object]:
        return {self.name: self.function}

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.uses)})"


@dataclass(frozen=True)
class LaunchKernel(Issue):
    """arguments: tensors, then numbers.  kernel: where it exchanges nothing with other ranks."""

    kernel: Kernel | None = None

    @property
    def is_sending(self) -> bool:
        return self.kernel is None


@dataclass(frozen=True)
class LaunchBatch(Issue):
    """Kernels one after the other, as one launch.  launches: their names."""

    launches: tuple[str, ...] = ()


@dataclass(frozen=True)
class Communicate(Issue):
    """Collectives.  arguments: for each what it is given, and where its result goes."""

    handle: ClassVar[str] = QUEUE

    @property
    def is_sending(self) -> bool:
        return True


@dataclass(frozen=True)
class Free(Step):
    """Names that nothing reads any more."""

    names: tuple[str, ...]

    @property
    def uses(self) -> tuple[str, ...]:
        return self.names

    def __str__(self) -> str:
        return f"del {', '.join(self.names)}"


@dataclass(frozen=True)
class Return(Step):
    """What the program gives: a name or what is made of it, and ``None`` for what this rank has nothing of."""

    results: tuple[str | Call | None, ...]

    @property
    def uses(self) -> tuple[str, ...]:
        return tuple(name for r in self.results if r is not None for name in ((r,) if isinstance(r, str) else r.uses))

    @property
    def calls(self) -> Mapping[str, object]:
        return called(r for r in self.results if isinstance(r, Call))

    def __str__(self) -> str:
        return f"return ({''.join(f'{r}, ' for r in self.results)})"


def names_of(tensors: Iterable[BoundTensor]) -> tuple[str, ...]:
    return tuple(t.name for t in tensors)


def program_text(inputs: Sequence[str], steps: Sequence[Step]) -> str:
    """The text of the function ``program``."""
    return "\n    ".join([f"def program({', '.join(inputs)}):", *map(str, steps)]) + "\n"


def last_sending_line(steps: Sequence[Step]) -> int:
    """The line of ``program_text`` behind which nothing is sent any more, counted from 1; 0 where nothing is."""
    return max((line for line, step in enumerate(steps, 2) if step.is_sending), default=0)


def called(steps: Iterable[Step]) -> dict[str, object]:
    """What the names in the text of ``steps`` stand for."""
    return {name: what for step in steps for name, what in step.calls.items()}


def labels_of(steps: Iterable[Step]) -> dict[str, str]:
    """What runs on the device, by the names that it is called by."""
    runs = [step.collective if isinstance(step, Start) else step for step in steps]
    return {s.name: s.label for s in runs if isinstance(s, Call | Issue) and s.label}
