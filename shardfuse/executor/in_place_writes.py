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

import ast
from collections.abc import Callable, Sequence

import torch

from ..codegen.source import KernelSource
from ..ir.digits import Axis, joined
from ..ir.expr import BoundTensor


def reads_before_it_writes(source: KernelSource, read: BoundTensor, written: BoundTensor) -> bool:
    """Does the kernel load ``read`` at the places at which it stores ``written``, once each and before the store there?

    What it stores at one place is at no other.  A function of the kernel's text stands before its callers.
    """
    if written not in source.tensors:
        return False  # a kernel that chunks share is written in another one's names
    if read not in source.tensors:
        return True
    tree = ast.parse(source.text)
    loads, stores = _Accesses.of(tree, f"{read}_ptr"), _Accesses.of(tree, f"{written}_ptr")
    if not loads.is_plain or not stores.is_plain or loads.kinds != {"load"} or stores.kinds != {"store"}:
        return False
    if loads.count != len(loads.lines) or loads.lines.keys() != stores.lines.keys():
        return False
    return all(line < stores.lines[place] for place, line in loads.lines.items())


def is_dense(tensor: torch.Tensor) -> bool:
    """Are there no gaps between its elements, and none that share a place?"""
    step = 1
    for d in reversed(_by_stride(tensor)):
        if tensor.stride(d) != step:
            return False
        step *= tensor.shape[d]
    return True


def in_same_order(
    read: Sequence[Axis], read_as: torch.Tensor, written: Sequence[Axis], written_as: torch.Tensor
) -> bool:
    """Do elements that dense tensors have of the same indices follow one another alike in memory?"""
    first, second = (joined(axes[d] for d in _by_stride(t)) for axes, t in ((read, read_as), (written, written_as)))
    return first == second


def _by_stride(tensor: torch.Tensor) -> list[int]:
    """Its dims, the outermost in memory first, but for those of one element."""
    return sorted((d for d in range(tensor.ndim) if tensor.shape[d] != 1), key=lambda d: -tensor.stride(d))


class _Accesses:
    """Every use of a pointer: the calls, how many there are, and the first line of each place, which is a text."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        self.lines: dict[str, int] = {}
        self.count = 0
        self.is_plain = True

    @classmethod
    def of(cls, tree: ast.Module, pointer: str) -> _Accesses:
        found = cls()
        inside: set[ast.AST] = set()
        own = {f.name for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                names = [n for n in ast.walk(node.args[0]) if isinstance(n, ast.Name) and n.id == pointer]
                if names and not any(n in inside for n in names):
                    inside.update(names)
                    found.kinds.add(node.func.attr)
                    place = ast.unparse(node.args[0]).replace(pointer, "_")
                    found.lines[place] = min(node.lineno, found.lines.get(place, node.lineno))
                    found.count += 1
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in own:
                inside.update(n for n in node.args if isinstance(n, ast.Name) and n.id == pointer)
        every = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == pointer]
        found.is_plain = len(every) == len(inside)
        return found


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
