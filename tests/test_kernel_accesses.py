"""What a kernel's source says of its loads and stores is what its text has, as Python's parser finds it there."""

from __future__ import annotations

import ast
import sys
from collections import Counter
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


def in_text(source: KernelSource) -> Counter[tuple[str, str]]:
    """How often each call has each pointer."""
    names = {f"{t}_ptr" for t in source.tensors}
    found: Counter[tuple[str, str]] = Counter()
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.Call) and node.args:
            kind = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
            read = {n.id for n in ast.walk(node.args[0]) if isinstance(n, ast.Name)}
            if kind in ("load", "store", "prefetch", "atomic_add") and not names.isdisjoint(read):
                found[kind, ast.unparse(node.args[0])] += 1
    return found


@pytest.mark.parametrize("case", [*(f"{w.name} {w.tiny[0]}" for w in WORKLOADS.values()), *LARGE])
def test_accesses_are_those_of_the_text(case: str) -> None:
    name, sizes = case.split()
    for _, source in planned(WORKLOADS[name], Case.parse(sizes)):
        said = Counter((a.kind, ast.unparse(ast.parse(a.pointer))) for stage in source.accesses for a in stage)
        assert said == in_text(source), source.text
        assert {a.tensor for stage in source.accesses for a in stage} <= set(source.tensors)
