"""What a module's forward and backward take of the host once their programs have run: calls of Python's and of torch's.

Kernels are left out, and collectives, whose calls do nothing: what is counted is what is the same on every device.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.distributed as dist
from exchange_cases import define, inputs, piece
from ranks import run_ranks
from torch.autograd.profiler import profile
from torch.autograd.profiler_util import FunctionEvent
from torch.distributed.tensor import Partial, Replicate, Shard

from benchmarks import host_time
from examples.lm_model import Block, ModelConfig
from shardfuse import DataType, DeviceMesh, nn
from shardfuse.executor import bound_collectives, program, program_tensors

PACKAGE = str(Path(nn.__file__).parents[1])
RANKS = 2
Step = Callable[[], object]
WARM = 4


def add_rms_norm(mesh: DeviceMesh) -> Step:
    """Of a sequence that is sharded, with the gradients of its parameters left to a bucket, as in a model."""
    norm = nn.AddRMSNorm(
        16, bias=True, mesh=mesh, input=Partial(), residual=Shard(0), output=Replicate(), output_grad=Partial(),
        parameters="local",
    )  # fmt: skip
    nn.bucket_gradients(torch.nn.ModuleList([norm]))
    return stepping(norm, drawn(8, 2, 16), drawn(8 // RANKS, 2, 16))


def swiglu(mesh: DeviceMesh) -> Step:
    module = nn.SwiGLU(16, bias=True, mesh=mesh, input=Shard(-1), parameters="local")
    return stepping(module, drawn(8, 2, 2 * 16 // RANKS))


def rotary(mesh: DeviceMesh) -> Step:
    module = nn.RotaryEmbedding(8, packed=(2, 2), batch_first=False)
    cos, sin = module.tables(torch.arange(6))
    return stepping(lambda x: module(x, cos=cos, sin=sin), drawn(6, 2, 6 * 8))


def linear(mesh: DeviceMesh) -> Step:
    """In a narrower dtype than that of the weight."""
    weight = drawn(16, 8).double().detach().requires_grad_()
    return stepping(lambda x: nn.functional.linear(x, weight), drawn(4, 2, 8))


def definition(mesh: DeviceMesh) -> Step:
    """Of a norm over a sharded axis, called without a module."""
    fd = define("rms_norm", 16, RANKS, DataType.Float)
    rank = dist.get_rank()
    here = [piece("rms_norm", k, v, RANKS, rank) for k, v in enumerate(inputs("rms_norm", 4, 16, torch.float32))]
    return lambda: fd.execute(here)


def block(mesh: DeviceMesh) -> Step:
    """Of the model of examples/lm_model.py, in a narrower dtype than that of its weights."""
    made = Block(ModelConfig(16, 1, 2, 16, 8), mesh)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    nn.bucket_gradients(made)
    tables = nn.RotaryEmbedding(8).tables(torch.arange(8))
    x, residual = (drawn(n, 2, 16).bfloat16().detach().requires_grad_() for n in (8, 8 // RANKS))
    return stepping(lambda x, residual: made(x, residual, tables), x, residual)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def stepping(call: Callable[..., torch.Tensor | Sequence[torch.Tensor]], *inputs: torch.Tensor) -> Step:
    def results() -> Sequence[torch.Tensor]:
        found = call(*inputs)
        return (found,) if isinstance(found, torch.Tensor) else found

    gradients = [torch.ones_like(t) for t in results()]
    return lambda: torch.autograd.backward(results(), gradients)


def calls_of_python(step: Step) -> int:
    """Of functions of shardfuse."""
    found = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal found
        code = frame.f_code
        is_comprehension = code.co_name in ("<listcomp>", "<genexpr>")  # of which later Pythons call no function
        found += event == "call" and not is_comprehension and code.co_filename.startswith((PACKAGE, "<shardfuse"))

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found


def calls_of_torch(step: Step) -> int:
    """Of ops that are called by Python, not by another op or by autograd."""
    with profile() as profiler:
        step()

    def is_called(event: FunctionEvent) -> bool:
        parent = event.cpu_parent
        while parent is not None and not parent.name.startswith("aten::"):
            parent = parent.cpu_parent
        return parent is None and event.name.startswith("aten::")

    return sum(map(is_called, profiler.function_events))


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_collectives, "may_bind", lambda device: True)
    monkeypatch.setattr(bound_collectives, "stages_through_host", lambda group, device: False)
    monkeypatch.setattr(bound_collectives, "backend_of", lambda group, device: None)
    monkeypatch.setattr(bound_collectives, "BackendChannel", lambda backend: host_time.Nothing())
    monkeypatch.setattr(bound_collectives, "nccl_channel", lambda *of: host_time.Nothing())
    monkeypatch.setattr(program, "evaluation_of", host_time.nothing_of)
    monkeypatch.setattr(program_tensors, "in_place", host_time.as_it_is)  # what a kernel writes is not put there


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize(
    ("made", "of_python", "of_torch"),
    [
        (add_rms_norm, 60, 18),
        (swiglu, 36, 10),
        (rotary, 35, 14),
        (linear, 10, 10),
        (definition, 11, 1),
        (block, 188, 95),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_calls_of_a_step(made: Callable[[DeviceMesh], Step], of_python: int, of_torch: int) -> None:
    """A change that needs more has to say why here.

    Of ``rotary``, 4 and 4 find where the halves of its result begin, which on a GPU is a sum of an address.
    """

    counted = threading.Barrier(RANKS)  # a profiler, of which there is one for all threads, makes ranges of calls

    def run(rank: int, size: int) -> tuple[int, int]:
        step = made(DeviceMesh(list(range(size))))
        for _ in range(WARM):
            step()
        python = calls_of_python(step)
        counted.wait(60)
        return python, (calls_of_torch(step) if rank == 0 else 0)

    (python, torchs), *others = run_ranks(RANKS, run)
    assert [found for found, _ in others] == [python] * (RANKS - 1), "every rank does the same"
    assert (python <= of_python, torchs <= of_torch) == (True, True), (python, torchs)
