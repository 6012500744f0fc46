"""Time to say why before gloo ends the process, where ranks do not call the same programs.

A message that is longer than what the receiver waits for has gloo throw, in a thread of its own where nothing catches
it: the process aborts within milliseconds, and the calls that differ are compared twice a second.  So the thread that
threw waits for a while before it aborts.  The watchdog finds the difference meanwhile, and ends all ranks with it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any, cast

_BEATS = 16
"""Comparisons of calls, of which there are two a second: what differs is named by the fourth."""
_SECONDS = 60.0
"""The longest that those are waited for, where the store is slow."""
_LIBRARY = "libstdc++.so.6"
_THROWN = b"N4gloo13EnforceNotMetE"
"""The class of what gloo throws, as the C++ library names it."""
_NAME = 8
"""Bytes of an object of ``std::type_info`` before its name.  Source: the Itanium C++ ABI."""
_Handler = cast(Any, ctypes.CFUNCTYPE(None))


class HeldAbort:
    """``start()``: from now on gloo's thread waits until calls were compared before it aborts; ``stop()``: no longer.

    beat: how often they were compared by now; ``None`` where they are not any longer.  is_ending: whether a thread of
    this process ends it with an error of its own, which says more than gloo's: nothing aborts it meanwhile.
    Does nothing without GNU's C++ library, which torch is built with.
    """

    def __init__(self, beat: Callable[[], int | None], is_ending: Callable[[], bool]) -> None:
        self._beat, self._is_ending = beat, is_ending
        self._handler = _Handler(self._wait)
        self._library: Any = None
        self._thrown: Any = None
        self._before: int | None = None

    def start(self) -> None:
        try:
            self._library = ctypes.CDLL(_LIBRARY)
            self._thrown = self._library["__cxa_current_exception_type"]
            self._thrown.restype = ctypes.c_void_p
            self._before = self._set(ctypes.cast(self._handler, ctypes.c_void_p))
        except (OSError, AttributeError):
            self._library = None

    def stop(self) -> None:
        """A handler that somebody has set since stays."""
        if self._library is None:
            return
        found = self._set(ctypes.c_void_p(self._before))
        if found != ctypes.cast(self._handler, ctypes.c_void_p).value:
            self._set(ctypes.c_void_p(found))
        self._library = None

    def _set(self, handler: ctypes.c_void_p) -> int | None:
        """Have ``std::terminate`` call ``handler``; gives the one that it called before."""
        set_terminate: Any = self._library["_ZSt13set_terminatePFvvE"]
        set_terminate.argtypes, set_terminate.restype = [ctypes.c_void_p], ctypes.c_void_p
        return cast("int | None", set_terminate(handler))

    def _is_gloos(self) -> bool:
        found: int | None = self._thrown()
        return found is not None and ctypes.c_char_p.from_address(found + _NAME).value == _THROWN

    def _wait(self) -> None:
        """In the thread that threw.  What was set before says what was thrown, and aborts."""
        first, deadline = self._beat() or 0, time.monotonic() + _SECONDS
        while self._is_gloos() and time.monotonic() < deadline:
            now = self._beat()
            if not self._is_ending() and (now is None or now - first >= _BEATS):
                break
            time.sleep(0.05)
        if self._before is not None:
            _Handler(self._before)()
