# pyright: reportPrivateUsage=false
"""Do tensors still have the values that a backward reads?

Autograd compares versions of the tensors that a function saves.  A DTensor counts the changes that are made to it, and
its local tensor, which fusions read, does not count them.

Under torch.compile graphs save local tensors too; there writes are compared while AOTAutograd traces the backward, by
the count that torch's functionalization keeps of them, so that the compiled code has nothing to compare.

Not seen: what is written into a DTensor between a compiled forward and its backward by what is not in the graph
(torch's own modules do not see it there either), or in a graph that is run without AOTAutograd (backend="eager"); and
into a DTensor activation of which a module makes another view first, as norms over several dims do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch._subclasses.functional_tensor import FunctionalTensor

from ..errors import ChangedBeforeBackwardError

Watched = list[tuple[torch.Tensor, int]]
"""Tensors that count as those do which are read, and the version that each had in the forward."""
Kept = list[tuple[Watched, list[int]]]
"""For each op that a module has run: what its backward will look at, and which results it reads."""

_core: Any = torch._C
_autograd: Any = _core._autograd
_core_counter: Callable[[torch.Tensor], int] = cast("Any", torch)._functionalize_mutation_counter
_detached: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
_hooks: Callable[[bool], object] = _autograd._top_saved_tensors_default_hooks


class _Activations(threading.local):
    """DTensors whose module is being called, each behind the local tensor that it takes."""

    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    kept: Kept | None = None
    """Of the module's ops; None where no DTensors come out of it."""


_activations = _Activations()


@contextmanager
def taken_of(local: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> Generator[Kept]:
    """While a module is called on ``local`` tensors, of which some are those of DTensors ``given``.

    What it yields is for ``watch_results``.
    """
    before = _activations.pairs, _activations.kept
    kept: Kept = []
    _activations.pairs = [(a, b) for a, b in zip(local, given, strict=True) if a is not b]
    _activations.kept = kept
    try:
        yield kept
    finally:
        _activations.pairs, _activations.kept = before


def watch_results(kept: Kept, local: Sequence[torch.Tensor], wrapped: Sequence[torch.Tensor]) -> None:
    """The DTensors ``wrapped`` around ``local`` results that the backward reads are not to be written into either."""
    for watched, read in kept:
        for k in read:
            if k < len(wrapped) and _core._is_alias_of(cast("Any", wrapped[k])._local_tensor, local[k]):
                watched.append((_counting_as(wrapped[k]), wrapped[k]._version))


def watch(origins: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], saved: Sequence[int]) -> Watched:
    """The DTensors whose values are ``saved``: indices into ``tensors``, and beyond them.

    ``origins``: the tensors whose values those have, as parameters; empty where they are the same.  DTensors whose
    module is being called are not held, since they would outlive what a backward lets go of.  None where hooks take
    what is saved, and may give back a copy: autograd compares no versions then either.
    """
    pairs, kept = _activations.pairs, _activations.kept
    if not (origins or pairs) or _hooks(True) is not None:
        return []
    found = [origins[k] for k in saved if k < len(origins)]
    watched: Watched = []
    if kept is not None:
        kept.append((watched, [k - len(tensors) for k in saved if k >= len(tensors)]))
    watched += [(t, t._version) for t in found if type(t) is not torch.Tensor]
    if pairs:
        read = [tensors[k] for k in saved if k < len(tensors)]
        watched += [(_counting_as(given), given._version) for local, given in pairs if any(t is local for t in read)]
    return watched


def _counting_as(dtensor: torch.Tensor) -> torch.Tensor:
    """What counts the writes into a DTensor, also those before its caller let go of it, and holds none of its data.

    Below torch's dispatch a DTensor is a tensor without a storage, and detaching it makes another of the same counter.
    """
    with _core._DisableTorchDispatch():
        return _detached(dtensor)


def check_unchanged(watched: Watched) -> None:
    """Raises ChangedBeforeBackwardError."""
    for tensor, version in watched:
        if tensor._version != version:
            raise ChangedBeforeBackwardError(tuple(tensor.shape), tensor.dtype, tensor._version, version)


def check_behind(results: Sequence[torch.Tensor], watched: Watched) -> None:
    """Have the backward of ``results`` begin with the check: of an op that saves tensors by itself."""
    if not watched and _activations.kept is None:
        return

    def check(gradients: object) -> None:
        check_unchanged(watched)

    for node in dict.fromkeys(r.grad_fn for r in results if r.grad_fn is not None):
        node.register_prehook(check)


def traced_writes(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each has been written so far in the graph that AOTAutograd traces; 0 where it traces none.

    A write into a DTensor counts as one into the local tensor whose storage it has, and so for every other alias.
    """
    return [0 if elem is None else _core_counter(elem) for elem in map(_functional, tensors)]


def check_not_written(saved: Sequence[torch.Tensor], before: Sequence[int]) -> None:
    """Raises ChangedBeforeBackwardError where a graph writes what its backward reads.  before: ``traced_writes``."""
    for tensor, then, now in zip(saved, before, traced_writes(saved), strict=True):
        if now != then:
            raise ChangedBeforeBackwardError(tuple(tensor.shape), tensor.dtype, now, then)


def _functional(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.elem if isinstance(tensor, FunctionalTensor) else None
