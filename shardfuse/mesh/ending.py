"""What a rank that ends by an exception says of it, on its terminal and to the other ranks, and how it ends."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import textwrap
import threading
import traceback
from types import TracebackType
from typing import NoReturn

import torch.distributed as dist

from shardfuse.errors import PeerLostError, ProgramMismatchError, ShardfuseError
from shardfuse.mesh.watchdog import Fault
from shardfuse.rank_errors import WaitingCircleError
from shardfuse.source_line import from_here, is_callers

INTERRUPTED = 128 + signal.SIGINT
"""The exit code that shells give Ctrl-C."""
_EXIT_HANDLERS = 5.0
"""Seconds that atexit's functions have in a rank that fails."""


def is_of_communication(error: BaseException, trace: TracebackType | None) -> bool:
    """Does it come out of torch.distributed?  torch raises RuntimeErrors, and classes of it, for anything at all."""
    frames = traceback.extract_tb(trace)
    innermost = frames[-1].filename if frames else ""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/torch/distributed/" in innermost)


def fault_of(error: BaseException, rank: int) -> Fault:
    """Whose fault an exception is, for the other ranks: not always that of the rank that ends by it."""
    if isinstance(error, PeerLostError):
        return Fault(error.rank, error.reason)
    if isinstance(error, ProgramMismatchError | WaitingCircleError):
        return Fault(None, str(error))
    if isinstance(error, KeyboardInterrupt):
        return Fault(rank, "was interrupted")
    return Fault(rank, f"failed: {sentence(error)}")


def sentence(error: BaseException) -> str:
    """One line."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, ShardfuseError):
        return str(error).replace("\n  at ", "; at ")
    return f"{type(error).__name__}: {error}{_place_of(error)}"


def _place_of(error: BaseException) -> str:
    """The caller's line that came to a collective in which ``error`` was raised, as by the end of its time."""
    if not is_of_communication(error, error.__traceback__):
        return ""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_callers(frame.filename)]
    return "".join(f"; at {from_here(frame.filename)}:{frame.lineno}: {frame.line}" for frame in frames[-1:])


def shown(error: BaseException, trace: TracebackType | None, rank: int) -> str:
    """What a terminal shows above that line: of a ShardfuseError the caller's frames, of others the whole traceback."""
    if isinstance(error, PeerLostError | KeyboardInterrupt):
        return ""
    if not isinstance(error, ShardfuseError):
        return _indented("".join(traceback.format_exception(type(error), error, trace)), rank)
    frames = [frame for frame in traceback.extract_tb(trace) if is_callers(frame.filename)]
    notes = "".join(f"{note}\n" for note in getattr(error, "__notes__", ()))
    text = f"Traceback (most recent call last):\n{''.join(traceback.format_list(frames))}{notes}"
    return _indented(text, rank)


def end_process(code: int) -> NoReturn:
    """End with what `atexit` has, for a few seconds at most, and with all that was printed."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, once the other ranks have ended
    late = threading.Timer(_EXIT_HANDLERS, os._exit, (code,))
    late.daemon = True
    late.start()
    try:
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _indented(text: str, rank: int) -> str:
    return textwrap.indent(text, f"[rank{rank}]: ", lambda line: True)
