"""Scripts that reproduce a run: the definition, and random inputs of the same shapes, strides and dtypes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ..errors import KernelCompileError, ShardfuseError
from ..ir.scalar import number_text
from ..ops.host import python_number


def described(value: object) -> str:
    """Python for an argument like this one: of a tensor without its data."""
    if isinstance(value, torch.Tensor):
        return _tensor_text(value)
    value = python_number(value)
    return number_text(value) if isinstance(value, int | float | complex) else repr(value)  # which may be what is wrong


def _tensor_text(x: torch.Tensor) -> str:
    where = f"dtype={x.dtype}, device={str(x.device)!r}"
    shape = tuple(x.shape)
    if x.is_contiguous():
        return f"torch.testing.make_tensor({shape}, {where})"
    stored = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, x.stride(), strict=True))
    strides = tuple(x.stride())
    if x.dtype.is_floating_point:
        return f"torch.randn({stored}, {where}).as_strided({shape}, {strides})"
    high = 2 if x.dtype == torch.bool else 10
    return f"torch.randint(0, {high}, ({stored},), {where}).as_strided({shape}, {strides})"


def repro_script(definition: object, inputs: list[str] | None, module: str = "shardfuse") -> str:
    """``definition``: its ``repr`` is Python that defines ``nvfuser_fusion``.  ``inputs``: as `described`.

    ``module``: where the script has its names from.
    """
    lines = [f"#  {i}: {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    text = repr(definition)
    names = ["FusionDefinition", "DataType", *(n for n in ("DeviceMesh", "ParallelType") if n in text)]
    head = [
        "# CUDA devices:",
        *lines,
        f"# torch version: {torch.__version__}",
        f"# cuda version: {torch.version.cuda}",
        "import torch",
        f"from {module} import {', '.join(names)}",
    ]
    body = f"{text}with FusionDefinition() as fd:\n    nvfuser_fusion(fd)\n"
    script = "\n".join(head) + "\n" + body
    if inputs is None:
        return script
    arguments = "".join(f"    {text},\n" for text in inputs)
    return f"{script}\ninputs = [\n{arguments}]\nfd.execute(inputs)\n"


class reproduced:  # noqa: N801 - used as a statement
    """What the body raises ends with ``script``, but for errors whose message already says what to do.

    A failure of another rank or of the network, and want of memory, have nothing to do with the definition.
    """

    __slots__ = ("script",)

    def __init__(self, script: Callable[[], str]) -> None:
        self.script = script

    def __enter__(self) -> None:
        """Nothing: every call of a fusion comes by."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, _NOT_OURS):
            return
        fails_to_compile = any(isinstance(e, KernelCompileError) for e in (error, error.__cause__))
        if fails_to_compile or not isinstance(error, ShardfuseError):
            error.add_note(f"where this is shardfuse's fault, please report it with:\n{self.script()}")


_NOT_OURS = (torch.OutOfMemoryError, MemoryError, dist.DistError)
