"""``torch.compile(backend="shardfuse")`` where kernels run: training, CUDA graphs, and what is taken by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from compile_graphs import assert_near
from torch._inductor import config

from shardfuse.compile import report

pytestmark = pytest.mark.gpu
F = torch.nn.functional


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    report(clear=True)
    with config.patch(force_disable_caches=True):
        yield


def norm_of_residual(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.gelu(x) + y, (x.shape[-1],), w, b)


def trained(f: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = f(*leaves)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, seed)]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_training(dtype: torch.dtype, mode: str, device: torch.device) -> None:
    """Three steps on other data, the later ones replays where the mode has CUDA graphs."""
    from shardfuse.compile.backend import backend

    def all_of_it(gm: torch.fx.GraphModule, given: list[torch.Tensor]) -> Callable[..., object]:
        return backend(gm, given, mode=mode, options={"shardfuse.take": "all"})

    compiled = torch.compile(norm_of_residual, backend=all_of_it, fullgraph=True)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        inputs = [torch.randn(shape).to(device, dtype) for shape in ((96, 520), (96, 520), (520,), (520,))]
        found = [x.clone() for x in trained(compiled, *inputs)]
        eager = trained(norm_of_residual, *inputs)
        wide = trained(norm_of_residual, *(x.double() for x in inputs))
        for k, (mine, own, right) in enumerate(zip(found, eager, wide, strict=True)):
            assert_near(mine, right, own, n=4, terms=right.abs().amax(), signed=False, what=f"result {k}")
    assert {r.graph for r in report().taken} == {"forward", "backward"}


def test_long_rows_are_taken_and_small_ones_left(device: torch.device) -> None:
    f = torch.compile(lambda x: x.softmax(-1), backend="shardfuse", dynamic=False)
    for rows, columns, taken in ((4096, 32768, 1), (4, 64, 0)):
        report(clear=True)
        x = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
        assert_near(f(x), x.double().softmax(-1), x.softmax(-1), relative=True)
        assert len(report().taken) == taken, str(report())


def test_online_softmax_of_inductor_is_in_the_table(device: torch.device) -> None:
    """On a GPU Inductor takes maximum and sum of a row as one op of its own."""
    x = torch.randn(64, 5000, device=device)
    f = torch.compile(
        lambda x: F.cross_entropy(x, x.argmax(-1)), backend="shardfuse", options={"shardfuse.take": "all"}
    )
    assert_near(f(x), F.cross_entropy(x.double(), x.argmax(-1)), n=8)
    assert report().taken, str(report())


def test_symbolic_batch(device: torch.device) -> None:
    f = torch.compile(
        lambda x, w: F.rms_norm(x, (256,), w), backend="shardfuse", dynamic=True, options={"shardfuse.take": "all"}
    )
    w = torch.randn(256, device=device)
    for rows in (3, 17, 130):
        x = torch.randn(rows, 256, device=device)
        assert_near(f(x, w), F.rms_norm(x.double(), (256,), w.double(), torch.finfo(torch.float32).eps), n=4)
    assert len(report().taken) == 1


def test_regions_are_measured_alone(device: torch.device) -> None:
    f = torch.compile(lambda x: x.softmax(-1), backend="shardfuse", dynamic=False)
    f(torch.randn(4096, 32768, device=device, dtype=torch.bfloat16))
    (region,) = report(measure=True).regions
    assert region.measured_us is not None
    assert region.measured_inductor_us is not None
    assert 60 < region.measured_us < region.measured_inductor_us, "0.5 GB at 4.3 TB/s take 125 us"


def loss_of(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((x @ w.t()).float(), target)


def steps(backend: str, classes: int, device: torch.device) -> tuple[list[list[torch.Tensor]], int]:
    """The gradients of ten steps on the same data, and the most bytes that one of them took."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(2)
    x, w = (
        torch.randn(n, 256, generator=generator).to(device, torch.bfloat16).requires_grad_() for n in (3000, classes)
    )
    target = torch.randint(0, classes, (3000,), generator=generator).to(device)
    compiled = torch.compile(loss_of, backend=backend, dynamic=False)
    found = [list(torch.autograd.grad(compiled(x, w, target), [x, w])) for _ in range(10)]
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    torch.autograd.grad(compiled(x, w, target), [x, w])
    return found, torch.cuda.max_memory_allocated(device) - before


@pytest.mark.parametrize("classes", [8192, 32000, 151936])  # rows that Inductor does not pad
def test_memory_is_no_more_than_inductors(classes: int, device: torch.device) -> None:
    """The gradient of the logits lies in their memory, and is what it is anywhere else."""
    found, own = steps("shardfuse", classes, device)
    assert report().taken, "the loss is taken"
    with config.patch(inplace_buffers=False):
        apart, more = steps("shardfuse", classes, device)
    _, peer = steps("inductor", classes, device)
    assert own <= peer + (1 << 20), f"{own} bytes, Inductor's {peer}"
    assert own < more
    for gradients in found:
        for got, right in zip(gradients, apart[0], strict=True):
            assert torch.equal(got, right)
