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


@pytest.mark.parametrize("backward", [False, True], ids=["inference", "training"])
def test_a_norm_behind_grouped_query_attention(backward: bool, device: torch.device) -> None:
    """Keys and values of two heads, queries of eight, as in Llama, Qwen3 and Gemma3: attention of torch's kernel."""

    def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)

    def f(x: torch.Tensor, *heads: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x + attended(*heads), x.shape[-1:])

    torch.manual_seed(0)
    shapes = (2, 1024, 512), (2, 8, 1024, 64), (2, 2, 1024, 64), (2, 2, 1024, 64)
    x, *heads = (torch.randn(s).to(device, torch.bfloat16).requires_grad_(backward) for s in shapes)
    found = torch.compile(f, backend="shardfuse", options={"shardfuse.take": "all"})(x, *heads)
    y = attended(*heads).detach().double()
    right, own = (F.rms_norm(a + b, x.shape[-1:]).detach() for a, b in ((x.double(), y), (x, y.bfloat16())))
    assert_near(found.detach(), right, own, n=2)
    assert report().taken
    if backward:
        found.sum().backward()
        assert all(t.grad is not None and t.grad.isfinite().all() for t in (x, *heads))


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


class Dropped(torch.nn.Module):
    """Layers with a dropout, the residual and a norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = torch.nn.ModuleList(torch.nn.Linear(size, size) for _ in range(3))
        self.norm = torch.nn.ModuleList(torch.nn.LayerNorm(size) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear, norm in zip(self.linear, self.norm, strict=True):
            x = norm(F.dropout(linear(x), 0.25) + x)
        return x


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("size", [1024, 1000, 93])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_dropouts_keep_what_inductors_keep(dtype: torch.dtype, size: int, mode: str, device: torch.device) -> None:
    """Three layers, the seeds of which lie side by side.  If one element were kept that Inductor's kernels drop, what
    comes behind it would be off by a hundredth of the largest and more."""
    from shardfuse.compile.backend import backend

    def all_of_it(gm: torch.fx.GraphModule, given: list[torch.Tensor]) -> Callable[..., object]:
        return backend(gm, given, mode=mode, options={"shardfuse.take": "all"})

    if not numbers_are_by_place():
        pytest.skip("this torch numbers the elements of blocks, and may drop others")
    torch.manual_seed(0)
    model, x = Dropped(size).to(device, dtype), torch.randn(64, 3, size).to(device, dtype)
    weight = torch.randn_like(x)
    found: list[list[torch.Tensor]] = []
    for way in (all_of_it, "inductor"):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=way, fullgraph=True)
        steps: list[torch.Tensor] = []
        for step in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            torch.manual_seed(step)
            out = compiled(x)
            (out * weight).sum().backward()
            steps += [out.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            model.zero_grad()
        found.append(steps)
        if way is all_of_it:
            drawn = [dict(r.ops).get("inductor_random", 0) for r in report().taken if r.graph == "forward"]
            assert drawn == [1, 1, 1], "the masks are drawn inside"
    for k, (mine, theirs) in enumerate(zip(*found, strict=True)):
        far = (mine.double() - theirs.double()).abs().amax() / theirs.double().abs().amax()
        assert far < (2e-2 if dtype == torch.bfloat16 else 1e-4), f"result {k} is {far:.1e} of the largest off"


def numbers_are_by_place() -> bool:
    from shardfuse.compile.random_op import numbers_blocks

    return not numbers_blocks(torch.device("cuda"))


def test_one_number_among_others_is_launched_as_any_other(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale that lies 4 bytes behind another, as a seed does."""
    from shardfuse import FusionDefinition
    from shardfuse.executor.kernel import Kernel

    def never(*_: object) -> object:
        return lambda *_: pytest.fail("launched through Triton's own entry")

    monkeypatch.setattr(Kernel, "_through_triton", never)
    x, scales = torch.randn(33, 512, device=device), torch.tensor([3.0, 5.0, 7.0], device=device)
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.mul(fd.from_pytorch(x), fd.from_pytorch(scales[1])))
    for k in range(3):
        (out,) = fd.execute([x, scales[k]])
        assert torch.equal(out, x * scales[k])
