"""What a kernel's source says of its loads and stores is what its text has, as Python's parser finds it there."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardfuse.codegen import KernelSource

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.sm90 import planned
from benchmarks.workload import Case
from benchmarks.workloads import WORKLOADS

LARGE = (
    *("softmax 2048x131072", "softmax 4096x50257", "rms_norm 8192x32768", "rms_norm_backward 8192x32768"),
    *("layer_norm_backward 8192x768", "layer_norm 4096x65536", "sum_outer 65536x512", "swiglu 8191x4097"),
    *("layer_norm 8192x24576:float16", "group_norm 2x640x64x64:float16", "softmax 4096x65536"),
)
"""Of each form of kernel, among them groups that fetch their next row, rows in whole words, and stages."""


def in_text(source: KernelSource) -> list[tuple[str, str]]:
    """Each call that has a pointer, with it, in the order of the text."""
    names = {f"{t}_ptr" for t in source.tensors}
    found: list[tuple[int, str, str]] = []
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.Call) and node.args:
            kind = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
            read = {n.id for n in ast.walk(node.args[0]) if isinstance(n, ast.Name)}
            if kind in ("load", "store", "prefetch", "atomic_add") and not names.isdisjoint(read):
                found.append((node.lineno, kind, ast.unparse(node.args[0])))
    return [(kind, pointer) for _, kind, pointer in sorted(found)]


def loads_before_stores(accesses: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
    """The pointers of loads that all stand before the first store at another pointer, with that."""
    last = {pointer: k for k, (kind, pointer) in enumerate(accesses) if kind == "load"}
    first = {pointer: k for k, (kind, pointer) in reversed([*enumerate(accesses)]) if kind == "store"}
    return {(load, store) for load, k in last.items() for store, at in first.items() if k < at}


@pytest.mark.parametrize("case", [*(f"{w.name} {w.tiny[0]}" for w in WORKLOADS.values()), *LARGE])
def test_accesses_are_those_of_the_text(case: str) -> None:
    """All of them, and loads before the stores that they are said to be before: an input is written over by that."""
    name, sizes = case.split()
    for _, source in planned(WORKLOADS[name], Case.parse(sizes)):
        stages = [[(a.kind, ast.unparse(ast.parse(a.pointer))) for a in stage] for stage in source.accesses]
        text = in_text(source)
        assert Counter(access for stage in stages for access in stage) == Counter(text), source.text
        for stage in stages:  # each of which may be a function, in any order
            own = [access for access in text if access in stage]
            assert loads_before_stores(stage) == loads_before_stores(own), source.text
        assert {a.tensor for stage in source.accesses for a in stage} <= set(source.tensors)
