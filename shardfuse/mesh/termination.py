"""SIGTERM in a rank, which a launcher sends where another rank has failed: say why before the process ends.

The signal's default action ends the process at once, often before a collective has raised or the watchdog, which looks
twice a second, has found the rank that failed. A handler in Python alone would be too late as well: it runs in the main
thread between two instructions, and not while that thread waits in a collective. So a thread of its own reads the
byte that Python writes at once when a signal comes (`signal.set_wakeup_fd`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

_STOP = b"\0"  # no signal has this number
_active: list[SigtermThread] = []
"""The one that has the signal now, if there is one."""


class SigtermThread:
    """A thread that calls ``act`` when SIGTERM comes.

    A handler of the caller's, set before or later, stays; outside of the main thread none can be set.
    """

    def __init__(self, act: Callable[[], NoReturn]) -> None:
        self._act = act
        self._reader, self._writer = -1, -1
        self._thread = threading.Thread(target=self._read, name="shardfuse-sigterm", daemon=True)

    def start(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.signal(signal.SIGTERM, self._handle)
        others = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if others != -1:  # an event loop's: the handler alone, then
            signal.set_wakeup_fd(others)
        self._thread.start()
        _active.append(self)

    def stop(self) -> None:
        """Give the signal its default action again."""
        if self not in _active:
            return
        _active.remove(self)
        self._release()
        os.write(self._writer, _STOP)
        self._thread.join()
        os.close(self._reader)
        if threading.current_thread() is threading.main_thread():
            os.close(self._writer)  # elsewhere Python may go on writing to it

    def forget(self) -> None:
        """In a forked process, which has no such thread, and which its parent may end by SIGTERM."""
        self._release()
        os.close(self._reader)
        os.close(self._writer)

    def _release(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            _restore_default_action()  # what Python itself has is set in the main thread only
            return
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, self._writer):
            signal.set_wakeup_fd(current)

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        """Write the byte once more: an event loop may have taken the first one."""
        os.write(self._writer, bytes([signal.SIGTERM]))

    def _read(self) -> None:
        while True:
            found = os.read(self._reader, 1)
            if found == _STOP:
                return
            if found[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) == self._handle:
                self._act()


def end_by_sigterm() -> NoReturn:
    """End this process as the signal's default action does, from any thread: its parent sees the signal's number."""
    _restore_default_action()
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(128 + signal.SIGTERM)  # the caller has the signal blocked


def _restore_default_action() -> None:
    """What `signal.signal` does in the main thread only."""
    ctypes.pythonapi.PyOS_setsig(int(signal.SIGTERM), None)


def _forget_in_child() -> None:
    for each in _active:
        each.forget()
    _active.clear()


os.register_at_fork(after_in_child=_forget_in_child)
