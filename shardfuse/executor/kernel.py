"""Generated text to something that launches: written to a cache directory, compiled, bound to its arguments."""

from __future__ import annotations

import functools
import hashlib
import linecache
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any, cast

import torch

from ..codegen.source import KernelSource
from ..errors import KernelCompileError, KernelLaunchError, NoKernelsError
from ..ir.scalar import Number
from ..kernel_functions.interpreted import index_by_arrays
from ..secure_files import keep_text
from .binaries import Asked, Binary, binary_of
from .compile_workers import Submit, begin, compiling_for, wait_for
from .driver import Driver, open_driver
from .launch import index_of
from .mailbox import Mailbox
from .triton_cache import keep_triton_private
from .triton_key import installed_triton, remember_triton_key

KERNELS = 512
"""Kernels that a process keeps for programs to come; those of programs that are kept stay with them."""

Argument = torch.Tensor | Number
Launch = Callable[..., None]
"""``launch(stream, *tensors, *scalars)``; stream: of ``begin_on``.  On a GPU an address stands for a tensor as well."""


_interpreting = Lock()
"""While the interpreter runs a kernel, ``triton.language`` has its functions, for all threads: simulated ranks."""


@dataclass(frozen=True)
class _Address:
    """What Triton asks of a tensor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def _as_pointer(x: Argument, dtype: torch.dtype) -> Argument | _Address:
    """What Triton takes for a pointer to ``dtype``: an address, and a tensor whose bits are read as another type."""
    if isinstance(x, torch.Tensor):
        return x if x.dtype is dtype or not x.is_cuda else _Address(x.data_ptr(), dtype)
    return _Address(int(x), dtype) if isinstance(x, int) else x


class Kernel:
    """A kernel of one rank, ready to launch.

    source: what ``generate`` gave.  interpret: does Triton's interpreter run it?
    """

    def __init__(self, source: KernelSource, directory: Path, *, interpret: bool = False) -> None:
        self.source = source
        self._interpret = interpret
        self._directory = directory
        self._ready: _Ready | None = None
        self._device = torch.device("cpu")
        self._options: dict[str, int | bool] = {
            "num_warps": source.num_warps,
            "num_stages": source.num_stages,
            "enable_fp_fusion": source.contracts,
        }
        if source.keeps_denormals:
            self._options["enable_reflect_ftz"] = False
        if source.max_registers is not None:
            self._options["maxnreg"] = source.max_registers
        if source.is_cooperative:
            # Programs wait for each other: a grid that is not resident at once is refused instead of hung.
            self._options["launch_cooperative_grid"] = True

    def launcher(self) -> Launch:
        """Takes tensors and scalars in the order of ``source.tensors``, ``source.scalars``; extents are bound."""
        launch = self.launcher_of(self.source)
        return _with_mailbox(launch, self.source.mailbox, self._device) if self.source.mailbox else launch

    def launcher_of(self, source: KernelSource) -> Launch:
        """``launcher`` of ``source``, which has another grid or other integers than the kernel's own.

        What it launches takes the address of a mailbox before its arguments, where the kernel has one.
        """
        otherwise = self._through_triton(source)
        if self._ready is None:

            def launch(stream: int | None, *arguments: Argument) -> None:
                otherwise(*arguments)
        else:
            driver, binary, function, device = (
                self._ready.driver, self._ready.binary, self._ready.function, self._ready.device
            )  # fmt: skip
            numbers = len(source.scalars)
            launch = driver.launcher(
                function, device, source.grid, binary.threads, binary.shared, source.is_cooperative,
                self._alignments(), binary.types[:numbers], binary.types[numbers:], source.integers,
                otherwise, self._refused,
            )  # fmt: skip
        return launch

    def compile(self, device: torch.device) -> None:
        """Have Triton compile for aligned tensors on ``device``, or find it compiled, without running.

        Raises ``KernelCompileError``, and ``NoKernelsError`` where there is nothing that runs one.
        """
        self._device = device
        if self._interpret:
            return
        if device.type != "cuda":
            raise NoKernelsError(device)
        try:
            self._ready = _ready(self._asked(device), self._directory, device)
        except RuntimeError as error:
            raise KernelCompileError(self.source.name, str(error), self.source.text) from error

    def begin_compiling(self, device: torch.device, submit: Submit) -> None:
        """Have another process compile it, for ``compile`` of a kernel like this to find: ``compile_workers.py``."""
        if not self._interpret:
            begin(self._asked(device), self._directory, compile_apart, submit)

    @property
    def driver(self) -> Driver | None:
        """What launches it; ``None`` where only Triton's own entry does."""
        return None if self._ready is None else self._ready.driver

    def resident(self) -> int | None:
        """How many programs the device runs at once; ``None`` where only Triton's own entry launches it."""
        if self._ready is None:
            return None
        ready, binary = self._ready, self._ready.binary
        return ready.driver.resident(ready.function, ready.device, binary.threads, binary.shared)

    def _asked(self, device: torch.device) -> Asked:
        source = self.source
        numbers = "".join("d" if s.dtype.is_floating else "q" for s in source.scalars) + "q" * len(source.integers)
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        options = tuple(self._options.items())
        return Asked(source.text, source.name, self._pointers(), self._alignments(), numbers, options, capability)

    def _pointers(self) -> tuple[torch.dtype, ...]:
        """The element type of each pointer, the first arguments."""
        return (*[torch.int64] * bool(self.source.mailbox), *(t.dtype.torch for t in self.source.tensors))

    def _alignments(self) -> str:
        """Of each pointer, as ``Asked`` has them: one number is read alone, wherever among others it lies."""
        of_tensors = ("w" if t.ndim else "e" for t in self.source.tensors)
        return "w" * bool(self.source.mailbox) + "".join(of_tensors)

    def _through_triton(self, source: KernelSource) -> Launch:
        """Triton's own entry, which takes no stream, any alignment, and whatever has hooked launches."""
        options, directory = self._options, self._directory
        pointers, held = self._pointers(), list[Any]()
        one_at_a_time = _interpreting if self._interpret else nullcontext()

        def launch(*arguments: Argument) -> None:
            addressed = zip(arguments, pointers, strict=False)
            tensors = [_as_pointer(x, dtype) for x, dtype in addressed]
            given = zip(arguments[len(pointers) :], source.scalars, strict=True)
            numbers = [float(cast(float, v)) if s.dtype.is_floating else int(cast(int, v)) for v, s in given]
            with one_at_a_time:
                function = held[0] if held else load_function(source.text, source.name, directory)
                function[(source.grid,)](*tensors, *numbers, *source.integers, **options)
                if not held:  # the program's own from now on: no table has to keep it
                    held.append(function)
                    _unregister(function)

        return launch

    def _refused(self, message: str) -> None:
        assert self._ready is not None, "it was launched"
        binary = self._ready.binary
        raise KernelLaunchError(self.source.name, message, self.source.grid, binary.threads, binary.shared)


@dataclass(frozen=True, eq=False)
class _Ready:
    """``binary`` loaded on the device of this index: ``function`` is the driver's handle."""

    driver: Driver
    binary: Binary
    function: int
    device: int


@functools.lru_cache(maxsize=KERNELS)
def _ready(asked: Asked, directory: Path, device: torch.device) -> _Ready | None:
    """Loaded once for all sizes; ``None`` where only Triton's own entry launches it.

    What is loaded stays on the device: a captured graph may launch it after all programs that had it are gone.
    """
    wait_for(asked, directory)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        binary = binary_of(asked, directory, lambda: _compiled(asked, directory))
        driver = None if binary is None else open_driver(directory)
        if binary is None or driver is None:
            return None
        index = index_of(device)
        function = driver.load(binary.image, binary.name, index, binary.threads, binary.shared)
    return _Ready(driver, binary, function, index)


def compile_apart(asked: Asked, directory: Path) -> None:
    """In a worker, which has no GPU: leave the binary in ``directory``."""
    with compiling_for(asked.capability):
        binary_of(asked, directory, lambda: _compiled(asked, directory))


def _compiled(asked: Asked, directory: Path) -> Any:
    """By Triton, for the current device: its compiled kernel."""
    from triton.errors import TritonError  # pyright: ignore[reportMissingTypeStubs]

    remember_triton_key(directory)
    held_to = zip(asked.pointers, asked.alignments, strict=True)
    tensors = [_Address(0 if alignment == "w" else dtype.itemsize, dtype) for dtype, alignment in held_to]
    numbers = [0.5 if kind == "d" else 3 for kind in asked.numbers]  # the text says their types
    function = load_function(asked.text, asked.name, directory)
    try:
        return function.warmup(*tensors, *numbers, grid=(1,), **dict(asked.options))
    except TritonError as error:
        raise KernelCompileError(asked.name, str(error), asked.text) from error


def _with_mailbox(launch: Launch, words: int, device: torch.device) -> Launch:
    """``launch`` with a mailbox of ``words`` words on ``device`` before its arguments."""
    mailbox = Mailbox(words)

    def launch_with_mailbox(stream: int | None, *arguments: Argument) -> None:
        launch(stream, mailbox.on(device, stream), *arguments)

    return launch_with_mailbox


def read_versions() -> str:
    """What a kernel's text is read by: a part of the key that it is cached under."""
    return f"torch {torch.__version__} triton {installed_triton()}"


@functools.lru_cache(maxsize=KERNELS)
def load_function(text: str, name: str, directory: Path) -> Any:
    """The ``@triton.jit`` function ``name`` of ``text``.  One object for one text: Triton keeps binaries by it.

    What runs is ``text`` itself, never what a file or a bytecode cache says; the file is there to be read.
    """
    key = hashlib.sha256(f"{read_versions()}\n{text}".encode()).hexdigest()[:32]
    keep_triton_private()
    path = keep_text(directory, f"{name}_{key}.py", text)
    # Triton asks for a function's source by way of linecache.
    lines = (len(text), None, text.splitlines(keepends=True), str(path))
    linecache.cache[str(path)] = lines
    module = ModuleType(path.stem)
    exec(compile(text, str(path), "exec"), module.__dict__)
    for value in module.__dict__.values():
        if type(value).__name__ == "InterpretedFunction":
            index_by_arrays()
            # Or it would leave what it makes in a table of its class.
            cast("dict[str, Any]", vars(value)).setdefault("rewritten_fn", {})
    function = getattr(module, name)
    weakref.finalize(function, _forget_lines, str(path), lines)
    _unregister(function)
    return function


def _unregister(function: Any) -> None:
    """Take a text's functions from Triton's table of all that it ever saw; it resolves preloaded kernels by that."""
    registry = getattr(sys.modules["triton.runtime.jit"], "_triton_jit_function_registry", {})
    names = function.fn.__globals__
    for name in names:
        registry.pop(f"{names['__name__']}:{name}", None)


def _forget_lines(path: str, lines: object) -> None:
    if linecache.cache.get(path) is lines:
        del linecache.cache[path]
