# pyright: reportUnknownMemberType=false
"""Runs of fusions as ranges of torch's profiler, under names that say what they compute.

    shardfuse::RMSNorm                                            a module's forward
    shardfuse::RMSNorm backward                                   its backward
    shardfuse: 3 mul, sum, div, add, rsqrt [8, 1024]              a call of ``fd.execute``
    shardfuse: max, sub, exp, sum, div [8, 64] at model.py:31     a region of a compiled graph

Who runs a program asks for ``profiler._is_profiler_enabled``, so that a call while nothing records costs no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.autograd import profiler as torch_profiler

from ..executor.binding import Argument
from ..ir.fusion import Fusion
from ..ir.op import Cast, RngOffset, RngSeed, Set, SizeOf, View

R = TypeVar("R")

profiler: Any = torch_profiler
_SILENT = (Cast, RngOffset, RngSeed, Set, SizeOf, View)
"""Ops that are named only where a fusion has no others: they compute nothing."""
_MOST = 6
"""Kinds of ops that a name has room for."""

_named: WeakKeyDictionary[Fusion, str] = WeakKeyDictionary()


def profiled(run: Callable[..., R], named: Callable[[Sequence[Argument]], str]) -> Callable[..., R]:
    """``run``, as a range.  ``named``: gives the name, by the arguments of the first call."""
    name = ""

    def in_range(*arguments: Argument) -> R:
        nonlocal name
        name = name or named(arguments)
        with torch_profiler.record_function(name):
            return run(*arguments)

    return in_range


def observed(run: Callable[..., R], fusion: Fusion) -> Callable[..., R]:
    """``run`` of ``fusion``, as a range while a profiler records."""
    if not profiler._is_profiler_enabled:
        return run
    return profiled(run, partial(name_of, fusion))


def name_of(fusion: Fusion, arguments: Sequence[Argument]) -> str:
    """The ops of ``fusion``, and the shape of the largest tensor among its arguments, on this rank."""
    text = ops_of(fusion)
    shapes = [a.shape for a in arguments if isinstance(a, torch.Tensor)]
    return f"shardfuse: {text} {list(max(shapes, key=torch.Size.numel))}" if shapes else f"shardfuse: {text}"


def counted(ops: Iterable[tuple[str, int]]) -> str:
    """``2 mul, sum``: names of ops, each with how often it is there."""
    return ", ".join(f"{n} {name}" if n > 1 else name for name, n in ops)


def ops_of(fusion: Fusion) -> str:
    """Those that compute, in the order in which the definition has them."""
    text = _named.get(fusion)
    if text is None:
        text = _named[fusion] = _ops_of(fusion)
    return text


def _ops_of(fusion: Fusion) -> str:
    telling = [r.op.name for r in fusion.records if not isinstance(r.op, _SILENT)]
    found = Counter(telling or [r.op.name for r in fusion.records])
    kinds = list(found.items())
    return counted(kinds[:_MOST]) + (", ..." if len(kinds) > _MOST else "")
