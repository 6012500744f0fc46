"""The C files of this folder as a module: made by the machine's C compiler, which Triton asks for too.

It is kept where kernels are.
What is loaded are the bytes that were verified, from memory: not a file that could be another, or shorter, by then.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, Protocol, cast
from weakref import ref

import torch

from ..config import read_c_compiler
from ..secure_files import read_sealed, write_sealed

LIBRARY = "libcuda.so.1"
_HEADER = Path(__file__).with_name("driver.h")
_SOURCES = tuple(Path(__file__).with_name(name) for name in ("driver.c", "ordered.c", "repeat.c", "nccl.c", "clock.c"))


class RepeatParts(NamedTuple):
    """What a repeated call compares and calls.

    check: is asked of the inputs; ``None`` where the caller has asked.  inputs: how many.  run: the program.
    otherwise: is called instead, with the inputs, where this thread cannot begin at once.  failed: is called with the
    inputs, an error and whether the program has raised it, and raises.  cache, programs: the cache of the definition,
    and what its attribute ``programs`` has been since.  made: what becomes its ``last_made``.  group: refers to the
    default process group; ``None`` without one.  held: of a program of several ranks, whose turn it is.  note, call:
    what notes a call.
    has_gradients: does an input require a gradient?  gives_list: are the outputs a new list?
    """

    check: Callable[..., bool] | None
    run: Callable[..., object]
    otherwise: Callable[[Sequence[torch.Tensor]], object]
    failed: Callable[[Sequence[torch.Tensor], Exception, bool], NoReturn]
    cache: object
    programs: object
    made: object
    group: ref[Any] | None
    held: object | None
    note: Callable[[Any], None] | None
    call: object
    inputs: int
    has_gradients: bool
    gives_list: bool
    c10d: ModuleType
    forward_ad: object
    is_grad_enabled: Callable[[], bool]
    set_grad_enabled: Callable[[bool], None]
    current_thread: Callable[[], object]
    is_of_autograd: Callable[[Any], bool]
    go_on: Callable[[Any, str], None]
    profiler: object


class Room(Protocol):
    """How much of a GPU a launch may take."""

    def left(self) -> int: ...


class Driver(Protocol):
    """The CUDA driver, as far as kernels need it.  All of it raises ``RuntimeError`` with the driver's own words."""

    def connect(self, library: str) -> None:
        """Open ``library`` for all that follows.  Raises ``OSError``."""
        ...

    def load(self, image: bytes, name: str, device: int, threads: int, shared: int) -> int:
        """The function ``name`` of a cubin on ``device``, ready for programs of so many threads and shared bytes."""
        ...

    def resident(self, function: int, device: int, threads: int, shared: int) -> int:
        """How many programs of so many threads and shared bytes the device runs at once."""
        ...

    def launcher(
        self, function: int, device: int, grid: int, threads: int, shared: int, cooperative: bool,
        alignments: str, types: str, fixed_types: str, fixed: tuple[int, ...],
        otherwise: Callable[..., object], failed: Callable[[str], object],
    ) -> Callable[..., None]:  # fmt: skip
        """``launch(stream, *tensors, *numbers)``: a tensor or an address for each of ``alignments``, a number for each
        of ``types``.

        alignments: ``w`` to 16 bytes, ``e`` any.  types: ``i`` int32, ``q`` int64, ``d`` float64.  fixed, fixed_types:
        numbers behind them, the same in every launch.  Where a tensor is not aligned so, or stream is ``None``,
        ``otherwise(*tensors, *numbers)`` is called instead.  failed: is called with the driver's words and raises.
        """
        ...

    def batch(self, launches: tuple[Callable[..., None], ...]) -> Callable[..., None]:
        """``launch(stream, *arguments)``: ``launches`` one after the other, each with its part of the arguments.

        They are one graph, whose launch costs less than that of one kernel.  Cooperative ones are refused by
        ``TypeError``.
        """
        ...

    def ordered(
        self, state: ctypes.Structure, count: ctypes.c_int64, report: ctypes.c_int64, device: int, table: int,
        room: Room, launches: dict[int, tuple[Callable[..., None], ...]], otherwise: Callable[..., object],
    ) -> Callable[..., None]:  # fmt: skip
        """``launch(stream, *arguments)``: launches of a kernel that waits for other GPUs, behind the last of all such.

        state: of `LaunchOrder`, by whose rules they follow one another.  count: is one more after each call.  report:
        0, until a kernel has waited in vain.  table: the address before the arguments.  launches: what is launched, by
        ``room.left()``; it may have more later.  ``otherwise(stream, *arguments)``, which does all of that, is called
        instead: with a report, without an entry of ``launches``, in a capture, before there is an event that is needed,
        and where a launch itself would call its own ``otherwise``.
        """
        ...

    def repeat(self, parts: RepeatParts) -> Callable[[Sequence[torch.Tensor]], Any]:
        """``again(inputs)``: the outputs of a program that has run on tensors like these; ``None`` where anything is
        not as it was."""
        ...

    def connect_nccl(self, library: str, driver: str) -> None:
        """Use the NCCL ``library`` that the process has loaded.  Raises ``OSError`` where it has not."""
        ...

    def collective(
        self, kind: int, communicator: int, count: int, dtype: int, operation: int,
        pieces: int = 1, given_step: int = 0, taken_step: int = 0,
    ) -> Callable[[int, torch.Tensor, torch.Tensor], None]:  # fmt: skip
        """``run(stream, given, taken)``: an asynchronous collective of ``count`` elements, as NCCL counts them.

        kind: 0 all-reduce, 1 all-gather, 2 reduce-scatter.  dtype, operation: NCCL's numbers.  pieces: so many
        collectives, each of ``count``, in one group, their tensors so many bytes behind those of the one before.
        """
        ...

    def group(self, collectives: tuple[Callable[..., None], ...]) -> Callable[..., None]:
        """``run(stream, given, taken, given, taken, ...)``: collectives of one communicator in one group of NCCL's.

        Raises ``TypeError`` for what is none.
        """
        ...

    def connect_clock(self, library: str) -> None:
        """Use the CUDA driver ``library`` for spans.  Raises ``OSError``."""
        ...

    def begin_span(self, device: int, stream: int) -> object | None:
        """A span of time that begins on the stream now; ``None`` in a graph that is being captured."""
        ...

    def end_span(self, span: object, stream: int) -> None:
        """Have it end where the stream is now."""
        ...

    def length_of_span(self, span: object) -> float:
        """Its milliseconds, for whose end is waited."""
        ...

    def begin_counting(self, communicator: int) -> None:
        """Forget what is known of a communicator that was at the same address."""
        ...

    def issued(self, communicator: int) -> int:
        """How many collectives this communicator was given."""
        ...

    def waiting(self) -> float:
        """For how many seconds an unfinished collective has been waiting, for other ranks or for this GPU.

        At least since the next one was issued while none that waited before it had ended, or since it was the newest.
        """
        ...


@functools.cache
def open_driver(directory: Path, library: str = LIBRARY) -> Driver | None:
    """The module, from ``directory`` or made and left there; ``None`` where that cannot be done, which is said once."""
    name = _name()
    try:
        driver = open_unconnected(directory)
        driver.connect(library)
    except (OSError, ImportError, subprocess.CalledProcessError) as error:
        said = str(error.stderr) if isinstance(error, subprocess.CalledProcessError) else str(error)
        warnings.warn(
            "kernels are launched through Triton's own entry, which takes some microseconds more: "
            f"{directory / name} {said}",
            stacklevel=2,
        )
        return None
    return driver


def open_unconnected(directory: Path) -> Driver:
    """The module, as it is before it has a library; what it does without one is ``repeat``.

    Raises ``OSError``, ``ImportError`` and ``subprocess.CalledProcessError``.
    """
    name = _name()
    content = read_sealed(directory, name)
    if content is None:
        content = build_driver(name)
        write_sealed(directory, name, content)
    return cast(Driver, _load(name, content))


def _name() -> str:
    """Of the module's file: another one for other sources, and for another Python."""
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    digest = hashlib.sha256(b"".join(s.read_bytes() for s in (_HEADER, *_SOURCES)) + suffix.encode()).hexdigest()[:32]
    return f"driver_{digest}{suffix}"


def _load(name: str, content: bytes) -> ModuleType:
    # The loader knows a library by its path: the descriptor is never closed, so that none is taken for another.
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    path = f"/proc/self/fd/{descriptor}"
    loader = importlib.machinery.ExtensionFileLoader("driver", path)
    spec = importlib.util.spec_from_file_location("driver", path, loader=loader)
    assert spec is not None, "it was given a loader"
    return importlib.util.module_from_spec(spec)


def build_driver(name: str) -> bytes:
    """The module, compiled.  Raises ``OSError`` and ``subprocess.CalledProcessError``."""
    compiler = read_c_compiler()
    if compiler is None:
        raise FileNotFoundError("needs a C compiler, which CC names")
    # Debian's Python has its headers where the scheme that packages go by does not say.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory) / name
        include = f"-I{sysconfig.get_paths(scheme)['include']}"
        command = [*compiler.split(), "-O2", "-shared", "-fPIC", include, *map(str, _SOURCES), "-o", str(made), "-ldl"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return made.read_bytes()
