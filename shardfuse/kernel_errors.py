"""Errors of generated kernels: they do not compile, cannot run, or were not launched."""

from __future__ import annotations

from .base_error import ShardfuseError


class KernelCompileError(ShardfuseError):
    """Triton could not compile a generated kernel."""

    def __init__(self, name: str, message: str, source: str) -> None:
        super().__init__(
            f"kernel {name} does not compile: {message}; the source stands below, please report it\n{source}"
        )


class NoKernelsError(ShardfuseError):
    """Kernels were asked for (``backend="triton"``) of tensors that no GPU has.  Nothing ran."""

    def __init__(self, device: object) -> None:
        super().__init__(
            f"backend='triton' has kernels, and found tensors on {str(device)!r}, expected a GPU's: move them there, "
            "set TRITON_INTERPRET=1 before Triton is imported, or leave backend out, and torch's operations run"
        )


class KernelLaunchError(ShardfuseError):
    """The CUDA driver refused a launch, or tells of what an earlier kernel did."""

    def __init__(self, name: str, message: str, grid: int, threads: int, shared: int) -> None:
        super().__init__(
            f"kernel {name} was not launched ({grid} programs of {threads} threads, {shared} bytes of shared memory): "
            f"{message}; after an error of an earlier kernel run with CUDA_LAUNCH_BLOCKING=1 to see where it comes from"
        )


# --- shardfuse.nn ------------------------------------------------------------------------------------------
