"""Generated text to something that launches: written to a cache directory, imported, bound to its arguments."""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..codegen.source import KernelSource
from ..errors import KernelCompileError
from ..ir.expr import Number
from .files import publish
from .launch import direct_launcher
from .mailbox import Mailbox
from .triton_key import remember_triton_key

Argument = torch.Tensor | Number


class Kernel:
    """A kernel of one rank, ready to launch.

    source: what ``generate`` gave.  interpret: does Triton's interpreter run it?
    """

    def __init__(self, source: KernelSource, directory: Path, *, interpret: bool = False) -> None:
        self.source = source
        self._interpret = interpret
        self._directory = directory
        self._function = load_function(source.text, source.name, directory)
        self._binary: Any = None
        self._options: dict[str, int | bool] = {
            "num_warps": source.num_warps,
            "num_stages": source.num_stages,
            "enable_fp_fusion": True,
        }
        if source.max_registers is not None:
            self._options["maxnreg"] = source.max_registers
        if source.mailbox:
            # Programs wait for each other: a grid that is not resident at once is refused instead of hung.
            self._options["launch_cooperative_grid"] = True

    def launcher(self) -> Callable[..., None]:
        """``launch(*tensors, *scalars)`` in the order of ``source.tensors``, ``source.scalars``; extents are bound."""
        run = self._function[(self.source.grid,)]
        fixed = self.source.integers
        options = self._options

        def launch(*arguments: Argument) -> None:
            run(*arguments, *fixed, **options)

        pointers = len(self.source.tensors) + bool(self.source.mailbox)
        if self._binary is None:
            direct = launch
        else:
            direct = direct_launcher(self._binary, self.source.grid, pointers, fixed, launch)
        return _with_mailbox(direct, self.source.mailbox) if self.source.mailbox else direct

    def compile(self, arguments: Sequence[Argument]) -> None:
        """Have Triton compile for ``arguments`` (tensors and scalars as for a launch), without running.

        Raises ``KernelCompileError``.  Alignment of pointers is part of what is compiled for.
        """
        if self._interpret:
            return
        from triton.errors import TritonError  # pyright: ignore[reportMissingTypeStubs]

        remember_triton_key(self._directory)
        mailbox = [torch.empty(self.source.mailbox, dtype=torch.int64, device="meta")] if self.source.mailbox else []
        try:
            self._binary = self._function.warmup(
                *mailbox, *arguments, *self.source.integers, grid=(self.source.grid,), **self._options
            )
        except (TritonError, RuntimeError) as error:
            raise KernelCompileError(self.source.name, str(error), self.source.text) from error


def _with_mailbox(launch: Callable[..., None], words: int) -> Callable[..., None]:
    """``launch`` with a mailbox of ``words`` words before its arguments."""
    mailbox = Mailbox(words)

    def launch_with_mailbox(*arguments: Argument) -> None:
        first = arguments[0]
        assert isinstance(first, torch.Tensor)
        launch(mailbox.on(first.device), *arguments)

    return launch_with_mailbox


def read_versions() -> str:
    """What a kernel's text is read by: a part of the key that it is cached under."""
    import triton  # pyright: ignore[reportMissingTypeStubs]

    return f"torch {torch.__version__} triton {triton.__version__}"


@functools.cache
def load_function(text: str, name: str, directory: Path) -> Any:
    """The ``@triton.jit`` function ``name`` of ``text``.  One object for one text: Triton keeps binaries by it.

    What runs is ``text`` itself, never what a file or a bytecode cache says; the file is there to be read.
    """
    key = hashlib.sha256(f"{read_versions()}\n{text}".encode()).hexdigest()[:32]
    path = directory / f"{name}_{key}.py"
    publish(path, text)
    # Triton asks for a function's source by way of linecache.
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    module = ModuleType(path.stem)
    exec(compile(text, str(path), "exec"), module.__dict__)
    return getattr(module, name)
