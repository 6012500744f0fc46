"""Programs as data: what a later process reads runs the same launches, and what is no kernel's is not kept."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from test_driver import COMPILER, Fake

from shardfuse import FusionDefinition
from shardfuse.executor import kept_programs, program
from shardfuse.executor.binaries import Binary
from shardfuse.executor.host_program import Program
from shardfuse.executor.kept_programs import as_data, from_data
from shardfuse.executor.kernel import Kernel, _Ready
from shardfuse.frontend import executor_cache

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """A GPU whose memory is the CPU's, and whose kernels are remembered instead of run."""
    found = Fake(tmp_path)

    def compiled(self: Kernel, device: torch.device) -> None:
        types = "".join("d" if s.dtype.is_floating else "q" for s in self.source.scalars)
        types += "q" * len(self.source.integers)
        binary = Binary("kernel", types, 32 * self.source.num_warps, 0, b"")
        self._ready = _Ready(found.driver, binary, 4096, 0)

    monkeypatch.setattr(Kernel, "compile", compiled)
    monkeypatch.setattr(Kernel, "resident", lambda self: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    on_cpu = torch._C._dynamo.guards._empty_strided_cpu
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", on_cpu)
    for module in (program, kept_programs):
        monkeypatch.setattr(module, "open_driver", lambda directory: found.driver)
    monkeypatch.setattr(executor_cache, "plan_on", lambda plan, *of: plan)
    return found


def bound(fd: FusionDefinition, inputs: list[torch.Tensor]) -> Program:
    """The program for these inputs, were they on the GPU."""
    call = fd.fec._prepare("key", inputs, {}, None)
    call = dataclasses.replace(call, bound=dataclasses.replace(call.bound, device=CUDA))
    return fd.fec._build(call, {}).program


def norm_and_sums() -> tuple[FusionDefinition, list[torch.Tensor]]:
    """Two kernels, one of which takes a number."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 64], contiguity=True)
        y = fd.define_tensor([-1, 96], contiguity=True)
        scale = fd.define_scalar()
        fd.add_output(fd.ops.mul(fd.ops.mul(x, scale), fd.ops.broadcast(fd.ops.sum(x, [1]), [False, True])))
        fd.add_output(fd.ops.sum(fd.ops.exp(y), [1]))
    return fd, [torch.zeros(8, 64), torch.zeros(24, 96)]


def launched(run: Program, inputs: list[torch.Tensor], fake: Fake) -> tuple[object, ...]:
    """Which kernels, how large, and what results are laid out as."""
    before = fake["launches"], fake["graph_launches"]
    results = run.run(*inputs, 0.5)
    counts = fake["launches"] - before[0], fake["graph_launches"] - before[1]
    return counts, fake["last_grid"], fake["last_threads"], [(r.shape, r.stride(), r.dtype) for r in results]


def test_a_program_that_is_read_launches_what_the_one_that_was_kept_does(fake: Fake, tmp_path: Path) -> None:
    fd, inputs = norm_and_sums()
    made = bound(fd, [*inputs, 0.5])
    content = as_data(made)
    assert content is not None
    again = from_data(content, CUDA, tmp_path)
    assert again is not None
    assert (again.text, again.apart, again.kernels) == (made.text, made.apart, made.kernels)
    assert again.by_address == made.by_address
    assert again.batches == made.batches
    for name, kernel in made.launched.items():
        other = again.launched[name]
        assert other._asked(CPU) == kernel._asked(CPU)
        assert (other.source.grid, other.source.mailbox) == (kernel.source.grid, kernel.source.mailbox)
    assert launched(again, inputs, fake) == launched(made, inputs, fake)


CPU = torch.device("cpu")


def test_what_torch_evaluates_is_not_kept() -> None:
    fd, inputs = norm_and_sums()
    fd.execute([*inputs, 0.5])
    assert fd.fec.last_program is not None
    assert as_data(fd.fec.last_program) is None


def test_data_of_another_form_is_not_read(fake: Fake, tmp_path: Path) -> None:
    fd, inputs = norm_and_sums()
    found = json.loads(as_data(bound(fd, [*inputs, 0.5])) or b"")
    assert from_data(json.dumps({**found, "form": 0}).encode(), CUDA, tmp_path) is None
