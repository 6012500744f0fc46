"""Kernels that write an output over the input that it replaces.

    own_T0, = own((T0,), (T1,))
    T2 = T0 if own_T0 else empty_T2()
    kernel_0_0(T0, T1, T2)
    replace(T0, T2)

Whether an input shares its storage with another one, a call tells: then its output is made apart, and copied.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

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


def own(targets: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[bool]:
    """For each of ``targets``: does no other tensor among all of them lie in its storage?"""
    storages = [t.untyped_storage().data_ptr() for t in (*targets, *others)]
    return [storages.count(here) == 1 for here in storages[: len(targets)]]


def replace(target: torch.Tensor, value: torch.Tensor) -> None:
    """``target`` has the values of ``value``, which may be ``target`` itself, written by a kernel."""
    if value is not target:
        target.copy_(value)
    elif not target.is_inference():
        torch.autograd.graph.increment_version(target)  # autograd has to see what no op of torch has written
