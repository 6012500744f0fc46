"""Kernels that write an output over the input that it replaces.

    own_T0, = own(T0, T1)
    T2 = T0 if own_T0 else empty((64, 8), (8, 1), float32)
    kernel_0_0(T0, T1, T2)
    replace(T0, T2)

Whether an input shares its memory with another one, a call tells: then its output is made apart, and copied.  An input
that its caller gives up shares it with none, and its memory is the output's::

    T2 = over(T0, (64, 8), (8, 1))
    kernel_0_0(T0, T1, T2)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from ..codegen.source import KernelSource, MemoryAccess
from ..ir.digits import Axis, joined
from ..ir.expr import BoundTensor


def reads_before_it_writes(source: KernelSource, read: BoundTensor, written: BoundTensor) -> bool:
    """Does the kernel load ``read`` at the places at which it stores ``written``, once each and before the store there?

    What it stores at one place is at no other.
    """
    if written not in source.tensors:
        return False  # a kernel that chunks share is written in another one's names
    if read not in source.tensors:
        return True
    every = [[a for a in stage if a.tensor in (read, written)] for stage in source.accesses]
    stages = [own for own in every if own]
    if len(stages) != 1:
        return False  # a later stage writes other programs' places
    branches = [[a for a in stages[0] if a.is_whole is is_whole] for is_whole in (False, True)]
    return all(_reads_first(own, read, written) for own in branches if own)


def _reads_first(own: Sequence[MemoryAccess], read: BoundTensor, written: BoundTensor) -> bool:
    """Of a program that has these accesses."""
    loads, stores = ([a for a in own if a.tensor is tensor] for tensor in (read, written))
    places = [a.place for a in loads]
    if {a.kind for a in loads} != {"load"} or {a.kind for a in stores} != {"store"}:
        return False
    first = {a.place: own.index(a) for a in reversed(stores)}
    is_once = len(set(places)) == len(places) and set(places) == first.keys()
    return is_once and all(own.index(a) < first[a.place] for a in loads)


def has_its_room(read_as: torch.Tensor, written_as: torch.Tensor) -> bool:
    """Is ``written_as`` dense, and has it as many elements as ``read_as`` has with the gaps between its rows and the
    one behind the last?"""
    width = _row_length(read_as)
    if width is None or not is_dense(written_as):
        return False
    if not is_dense(read_as) and [width] != [written_as.shape[d] for d in _by_stride(written_as)[-1:]]:
        return False
    rows = prod(read_as.shape[d] for d in _by_stride(read_as)[:-1])
    return rows * width == written_as.numel()


def is_dense(tensor: torch.Tensor) -> bool:
    """Are there no gaps between its elements, and none that share a place?"""
    dims = _by_stride(tensor)
    return _row_length(tensor) == (tensor.shape[dims[-1]] if dims else 1)


def _row_length(tensor: torch.Tensor) -> int | None:
    """How far the rows of ``tensor`` are apart, along the dim whose elements are neighbours, where nothing else has
    gaps; ``None`` where something has, or where elements share a place."""
    dims = _by_stride(tensor)
    if not dims:
        return 1
    *outer, inner = dims
    width = tensor.stride(outer[-1]) if outer else tensor.shape[inner]
    step = width
    for d in reversed(outer):
        if tensor.stride(d) != step:
            return None
        step *= tensor.shape[d]
    return width if tensor.stride(inner) == 1 and width >= tensor.shape[inner] else None


def in_same_order(
    read: Sequence[Axis], read_as: torch.Tensor, written: Sequence[Axis], written_as: torch.Tensor
) -> bool:
    """Are elements of the same indices at the same places of memory?  For tensors of which ``has_its_room`` holds.

    Where rows have gaps, their elements are taken to have the same index along the row: only rows are compared.
    """
    first, second = _by_stride(read_as), _by_stride(written_as)
    if not is_dense(read_as):
        first, second = first[:-1], second[:-1]
    return joined(read[d] for d in first) == joined(written[d] for d in second)


def _by_stride(tensor: torch.Tensor) -> list[int]:
    """Its dims, the outermost in memory first, but for those of one element."""
    return sorted((d for d in range(tensor.ndim) if tensor.shape[d] != 1), key=lambda d: -tensor.stride(d))


def owners(samples: Sequence[torch.Tensor], targets: int) -> Callable[..., list[bool]]:
    """``own(*tensors)``: for each of the first ``targets``, is no element of another tensor in its memory?

    samples: laid out as these tensors.  What is compared is where their elements are: tensors of several storages may
    be of one memory, as those of one array of NumPy's are, and pieces of one storage may be apart.
    """
    sizes = [_bytes(t) for t in samples]
    all_own = [True] * targets

    def own(*tensors: torch.Tensor) -> list[bool]:
        begins = [t.data_ptr() for t in tensors]
        free_from = 0
        for begin, size in sorted(zip(begins, sizes, strict=True)):
            if begin < free_from:
                break
            free_from = begin + size
        else:
            return all_own
        memory = [(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]
        return [sum(are_one(here, other) for other in memory) <= 1 for here in memory[:targets]]

    return own


def _bytes(tensor: torch.Tensor) -> int:
    """From where its first element begins to where the last one ends."""
    last = sum(s * (n - 1) for s, n in zip(tensor.stride(), tensor.shape, strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses at which its storage begins and ends."""
    storage = tensor.untyped_storage()
    begin = storage.data_ptr()
    return begin, begin + storage.nbytes()


def are_one(memory: tuple[int, int], other: tuple[int, int]) -> bool:
    """Have they bytes in common?"""
    return memory[0] < other[1] and other[0] < memory[1]


def replace(target: torch.Tensor, value: torch.Tensor) -> None:
    """``target`` has the values of ``value``, which may be ``target`` itself, written by a kernel."""
    if value is not target:
        target.copy_(value)
    elif not target.is_inference():
        torch.autograd.graph.increment_version(target)  # autograd has to see what no op of torch has written
