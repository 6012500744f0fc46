"""The names of a step are those of its text: what storage, batches and liveness go by is what Python runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
import torch

from shardfuse import FusionDefinition
from shardfuse.executor.host_program import DEVICE_CALLS
from shardfuse.executor.steps import (
    BEGIN,
    QUEUE_NOW,
    Address,
    Allocate,
    Bring,
    Call,
    Communicate,
    Cut,
    Free,
    Guard,
    LaunchBatch,
    LaunchKernel,
    Over,
    Rename,
    Return,
    Start,
    Step,
)

STEPS: list[Step] = [
    Guard(0, ("T0", "S1")),
    BEGIN,
    QUEUE_NOW,
    Bring("T0", "T0", torch.device("cpu")),
    Allocate("T1", (2, 3), (3, 1), torch.bfloat16),
    Allocate("T1", (), (), torch.float32, own="T0"),
    Over("T1", "T0", (8,), (1,)),
    Address("base", "workspace"),
    Address("T1", "base", 512),
    Cut(("T2", "T3"), "T1", len, (0, 12)),
    Rename("T2", "T1"),
    Rename("T2", "T1", "view((2, 3))"),
    Rename("T2", "None"),
    Call(("T2", "T3"), "torch_1", len, ("T0", "S1", "float('inf')", "complex(0.5, -2.0)", "3", "True")),
    Call(("own_T0",), "own", len, ("T0", "T1"), gives_list=True),
    Call(("own_T0", "own_T1"), "own", len, ("T0", "T1"), gives_list=True),
    Call((), "copy_all", len, (("T0",), ("T1", "T2"))),
    Call((), "wait", None, ("done_0", "T0")),
    Start(Call(("T2", "T3"), "collective_0", len, ("T0", "T1")), "done_0"),
    LaunchKernel("kernel_0_0", len, ("T0", "T1", "S0", "-1")),
    LaunchBatch("batch_of_kernel_0_0", len, ("T0", "T1"), launches=("kernel_0_0", "kernel_1_0")),
    Communicate("collective_0", len, ("T0", "T1")),
    Free(("T0", "T1")),
    Return(("T0", None, Call((), "stored", len, ("T1", "(4,)", "(1,)", "()")))),
]


def subclasses(kind: type[Step]) -> Iterator[type[Step]]:
    for one in kind.__subclasses__():
        yield one
        yield from subclasses(one)


def test_every_kind_of_step_is_here() -> None:
    bases = {kind.__mro__[1] for kind in subclasses(Step)}
    assert {kind for kind in subclasses(Step) if kind not in bases} == {type(step) for step in STEPS}


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_names_are_those_of_the_text(step: Step) -> None:
    nodes = [n for n in ast.walk(ast.parse(str(step))) if isinstance(n, ast.Name)]
    assert {n.id for n in nodes if isinstance(n.ctx, ast.Store)} == set(step.defines)
    read = {n.id for n in nodes if not isinstance(n.ctx, ast.Store)}
    known = {*step.calls, *DEVICE_CALLS, "program", "float", "complex"}
    assert {name for name in step.uses if name.isidentifier() and name not in ("None", "True")} == read - known
    assert read & known >= set(step.calls), "it calls what it says"


def test_a_program_frees_each_tensor_once_and_reads_none_that_it_freed() -> None:
    with FusionDefinition() as fd:
        x, y = fd.define_tensor([-1, 64], contiguity=True), fd.define_tensor([64, 32], contiguity=True)
        product = fd.ops.matmul(fd.ops.exp(x), y)
        fd.add_output(fd.ops.sum(fd.ops.relu(product), [1]))
        fd.add_output(fd.ops.matmul(fd.ops.tanh(product), fd.ops.permute(y, [1, 0])))
    fd.execute([torch.zeros(8, 64), torch.zeros(64, 32)])
    assert fd.fec.last_program is not None
    (function,) = ast.parse(fd.fec.last_program.text).body
    assert isinstance(function, ast.FunctionDef)
    made, freed = set[str](), set[str]()
    for line in function.body:
        names = [n for n in ast.walk(line) if isinstance(n, ast.Name)]
        assert not freed & {n.id for n in names}
        made |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
        freed |= {n.id for n in names if isinstance(n.ctx, ast.Del)}
    kept = {n.id for n in ast.walk(function.body[-1]) if isinstance(n, ast.Name)}
    assert len(freed) >= 3
    assert freed == made - kept
