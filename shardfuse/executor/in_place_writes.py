"""Kernels that write an output over the input that it replaces.

    own_T0, = own(T0, T1)
    T2 = T0 if own_T0 else empty_T2()
    kernel_0_0(T0, T1, T2)
    replace(T0, T2)

Whether an input shares its memory with another one, a call tells: then its output is made apart, and copied.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

import torch

from ..codegen.source import KernelSource
from ..ir.expr import BoundTensor


def reads_before_it_writes(source: KernelSource, read: BoundTensor, written: BoundTensor) -> bool:
    """Does the kernel load ``read`` at the places at which it stores ``written``, all of it before the first store?"""
    if written not in source.tensors:
        return False  # a kernel that chunks share is written in another one's names
    if read not in source.tensors:
        return True
    tree = ast.parse(source.text)
    loads, stores = _Accesses.of(tree, f"{read}_ptr"), _Accesses.of(tree, f"{written}_ptr")
    if not loads.is_plain or not stores.is_plain or loads.kinds != {"load"} or stores.kinds != {"store"}:
        return False
    return loads.places == stores.places and max(loads.lines) < min(stores.lines)


class _Accesses:
    """Every use of a pointer: the calls, their lines, and the places as text."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        self.places: set[str] = set()
        self.lines: list[int] = []
        self.is_plain = True

    @classmethod
    def of(cls, tree: ast.Module, pointer: str) -> _Accesses:
        found = cls()
        inside: set[ast.AST] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                names = [n for n in ast.walk(node.args[0]) if isinstance(n, ast.Name) and n.id == pointer]
                if names and not any(n in inside for n in names):
                    inside.update(names)
                    found.kinds.add(node.func.attr)
                    found.places.add(ast.unparse(node.args[0]).replace(pointer, "_"))
                    found.lines.append(node.lineno)
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
