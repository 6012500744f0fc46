"""Waits for words of other ranks under Triton's interpreter, in memory of the host that all of them write to.

They end as those of GPUs do: by the word, the limit, a report, or a rank that has given up (``mesh_exchange.py``,
``sending_rows.py``).  A limit of 0 is no wait at all: ranks that are run one after the other, in one process.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any, cast

ROW_BITS, NAME_BITS = 22, 10
"""Of a report, below the epoch: the row and the rank that is waited for."""
LATER = (1 << 20) - 1
"""A word is of a later launch where its number is ahead by that at most: one that was left behind may be of any age,
and so ahead by nearly 2**32."""
NAN = "0x7FC07FC0"
"""Of float32, and of both halves of 16 bits."""
_PUSH = """@triton.jit
def {name}(ptr, epoch, value):
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.store(ptr, (epoch.to(tl.int64) << 32) | bits)
"""
_AWAIT = '''from shardfuse.codegen import interpreted_waits as waits


@triton.jit
def {name}({pointers}, epoch, row, limit, report, names_ptr):
    """The values that all ranks have for ``row``, once every word carries ``epoch``; NaN for what does not come."""
    {words} = waits.await_words([{pointers}], epoch, {place}, limit, report, names_ptr{of_each})
    return {bits}
'''
_POST = """@triton.jit
def {name}({pointers}, turn):
    {stores}
"""
_AWAIT_ROWS = '''from shardfuse.codegen import interpreted_waits as waits


@triton.jit
def {name}({pointers}, turn, row, limit, report, names_ptr):
    """Wait until every flag is ``turn``.  Returns whether one is not, after the limit."""
    return waits.await_turn([{pointers}], turn, {place}, limit, report, names_ptr)
'''


def interpreted_push(name: str) -> str:
    """The function that stores a word."""
    return _PUSH.format(name=name)


def interpreted_await(name: str, count: int, of_each: int) -> str:
    """The function that waits for words at so many addresses, ``of_each`` of them of each rank."""
    bits = (f"tl.where(came{k}, word{k} & 0xFFFFFFFF, {NAN}).to(tl.int32)" for k in range(count))
    words, place = ", ".join(f"word{k}, came{k}" for k in range(count)), _place("epoch")
    own = f", {of_each}" if of_each > 1 else ""
    pointers = _names(count)
    return _AWAIT.format(name=name, pointers=pointers, words=words, bits=", ".join(bits), place=place, of_each=own)


def interpreted_post(name: str, peers: int) -> str:
    """The function that stores a turn at so many flags."""
    stores = "\n    ".join(f"tl.store(ptr{k}, turn)" for k in range(peers))
    return _POST.format(name=name, pointers=_names(peers), stores=stores)


def interpreted_await_rows(name: str, peers: int) -> str:
    """The function that waits for so many flags."""
    return _AWAIT_ROWS.format(name=name, pointers=_names(peers), place=_place("turn"))


def _place(number: str) -> str:
    return f"({number}.to(tl.int64) << 32) | ((row.to(tl.int64) & 0x{(1 << ROW_BITS) - 1:X}) << {NAME_BITS})"


def _names(count: int) -> str:
    return ", ".join(f"ptr{k}" for k in range(count))


def await_words(
    pointers: Sequence[Any], epoch: Any, place: Any, limit: Any, report: Any, names_ptr: Any, of_each: int = 1
) -> Any:
    """The words at ``pointers``, and of each whether it carries ``epoch``; one after the other."""
    mask, is_waiting = 0xFFFFFFFF, _number(limit) > 0
    wanted = _number(epoch) & mask

    def missing(words: Sequence[Any]) -> tuple[int | None, bool]:
        """Whose word has not come, and whether that rank has given up."""
        flags = [w.handle.data.reshape(-1) >> 32 & mask for w in words]
        late = next((k for k, found in enumerate(flags) if (found != wanted).any()), None)
        ahead = [((found - wanted) & mask).astype("int64") for found in flags]
        return late, any(((a > 0) & (a <= LATER)).any() for a in ahead)

    words = _polled(pointers, missing, place, limit, report, names_ptr, of_each)
    came = [(w >> 32) & mask == wanted if is_waiting else w == w for w in words]
    return tuple(x for pair in zip(words, came, strict=True) for x in pair)


def await_turn(pointers: Sequence[Any], turn: Any, place: Any, limit: Any, report: Any, names_ptr: Any) -> int:
    """Wait until the flags at ``pointers`` are ``turn``.  Returns 1 where one is not, after the limit."""
    wanted = _number(turn)

    def missing(words: Sequence[Any]) -> tuple[int | None, bool]:
        flags = [_number(w) for w in words]
        return next((k for k, found in enumerate(flags) if found != wanted), None), -1 in flags

    flags = _polled(pointers, missing, place, limit, report, names_ptr)
    return int(_number(limit) > 0 and missing(flags)[0] is not None)


def _polled(
    pointers: Sequence[Any], missing: Any, place: Any, limit: Any, report: Any, names_ptr: Any, of_each: int = 1
) -> list[Any]:
    """What stands at ``pointers`` when nothing is missing, or when the wait for it is over."""
    tl = cast(Any, importlib.import_module("triton.language"))
    patience, since, rest = _number(limit), time.monotonic_ns(), 50e-6
    report = report.to(tl.pointer_type(tl.int64))
    while True:
        words = [tl.load(p) for p in pointers]
        late, is_gone = missing(words)
        if late is None or not patience or _number(tl.load(report)):
            return words
        if is_gone or time.monotonic_ns() - since > patience:
            where = place.handle.data.reshape(-1)[0]
            tl.store(report, tl.load(names_ptr + late // of_each) | int(where))
            return words
        time.sleep(rest)  # other threads and ranks run
        rest = min(2 * rest, 5e-3)


def _number(value: Any) -> int:
    return int(value if isinstance(value, int) else value.handle.data.reshape(-1)[0])
