"""Rewrites around regions where kernels run: images in channels-last, dropout's masks, pools, lists of casts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor import config

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.nets.images import ResNet, Unet
from shardfuse.compile import report
from shardfuse.compile.random_op import register
from shardfuse.ops.random import philox

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    report(clear=True)
    with config.patch(force_disable_caches=True):
        yield


def unet() -> nn.Module:
    return Unet((64, 128), 1, 64, 0.25)


def resnet() -> nn.Module:
    return ResNet((1, 1), 32, 10)


class Copied(nn.Module):
    """Norms that read contiguous images, beside convolutions that Inductor gives channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3, padding=1)
        self.third, self.norm = nn.Conv2d(64, 32, 3, groups=8), nn.LayerNorm(32)
        self.last = nn.Linear(32, 10)

    def forward(self, image: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        f = nn.functional
        a = f.relu(f.instance_norm(self.first(f.pad(image, (1, 1, 1, 1), mode="reflect"))))
        b = f.gelu(self.norm(self.second(a).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        c = f.silu(f.batch_norm(torch.cat([a, b], 1), None, None, training=True))
        return f.cross_entropy(self.last(self.third(c).flatten(2).softmax(-1).amax(-1) * 100), labels)


def losses(
    build: Callable[[], nn.Module],
    backend: str,
    order: torch.memory_format,
    device: torch.device,
    options: dict[str, str | int | bool] | None = None,
) -> list[float]:
    torch.manual_seed(0)
    model = build().to(device=device, memory_format=order)
    torch.manual_seed(1)
    image = torch.randn(4, 4, 32, 32) if build is unet else torch.randn(4, 3, 64, 64)
    rest = (torch.randn(4, 64), torch.randn(4, 4, 16, 16)) if build is unet else (torch.randint(10, (4,)),)
    given = [x.to(device, memory_format=order) if x.ndim == 4 else x.to(device) for x in (image, *rest)]
    step = torch.compile(model, backend=backend, dynamic=False, options=options)
    found: list[float] = []
    for k in range(4):
        torch.manual_seed(10 + k)
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = step(*given)
        loss.backward()
        found.append(loss.item())
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), [p.grad for p in model.parameters()], alpha=-1e-2)
        for name, p in model.named_parameters():
            assert p.grad is not None
            long = [k for k, size in enumerate(p.shape) if size > 1]  # a stride of a dim of one element says nothing
            assert [p.grad.stride(k) for k in long] == [p.stride(k) for k in long], name
    return found


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels-last"])
@pytest.mark.parametrize("build", [unet, resnet])
def test_losses_of_convolutional_models_are_inductor_s(
    build: Callable[[], nn.Module], order: torch.memory_format, device: torch.device
) -> None:
    """A dropout that kept other elements would be off by percents."""
    peer, own = (losses(build, backend, order, device) for backend in ("inductor", "shardfuse"))
    assert own == pytest.approx(peer, rel=2.0**-7)
    assert peer[-1] < peer[0]


def test_what_a_region_asks_inductor_to_copy(device: torch.device) -> None:
    """The region is among the origins of such a copy, and Inductor writes these into comments of its kernel.

    A loss may be rounded to its neighbour in bfloat16.
    """
    peer = losses(Copied, "inductor", torch.contiguous_format, device)
    own = losses(Copied, "shardfuse", torch.contiguous_format, device, {"shardfuse.take": "all"})
    assert own == pytest.approx(peer, rel=2.0**-8)
    assert peer[-1] < peer[0]


def test_numbers_of_an_image_are_those_of_its_places(device: torch.device) -> None:
    """No block of Inductor's kernel draws another block's numbers, whichever torch generates it."""
    op = register()
    size, seed = [2, 64, 32, 32], torch.tensor(0x1234567_89ABCDEF, device=device)
    found = torch.compile(lambda s: op(size, s) * 1.0, fullgraph=True)(seed)
    word = philox(int(seed), 0, torch.arange(found.numel()))[0].reshape(size)
    folded = torch.where(word < 2**31, word, 2**32 - 1 - word)
    assert torch.equal(found.cpu(), folded.float() * 4.6566127342e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pool", [(3, 2, 1), (2, 2, 0), (3, 1, 1), (5, 3, 2)])
@pytest.mark.parametrize("size", [(2, 64, 56, 56), (1, 130, 33, 17), (3, 5, 8, 9)])
def test_max_pools_and_their_gradients(
    size: tuple[int, ...], pool: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    def gradient(f: Callable[..., torch.Tensor], x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        (f(leaf) * g).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    f = lambda x: torch.nn.functional.max_pool2d(x, *pool)  # noqa: E731
    x = torch.randn(size).to(device, dtype).contiguous(memory_format=torch.channels_last)
    g = torch.randn(f(x).shape).to(device, dtype).contiguous(memory_format=torch.channels_last)
    compiled = torch.compile(f, backend="shardfuse", dynamic=False, options={"shardfuse.take": "all"})
    for image in (x, x.round(), torch.where(x > 2, torch.nan, x), torch.full_like(x, -torch.inf)):
        torch.testing.assert_close(compiled(image), f(image), rtol=0, atol=0, equal_nan=True)
    found = gradient(compiled, x, g)
    right, terms = (gradient(f, x.double(), t) for t in (g.double(), g.double().abs()))
    # Windows that overlap are added up in float32, one rounding each behind the first; the sum is rounded once.
    added = (-(-pool[0] // pool[1])) ** 2 - 1
    bound = torch.finfo(dtype).eps / 2 + added * torch.finfo(torch.float32).eps / 2
    assert ((found.double() - right).abs() <= bound * terms).all()
    assert found.stride() == x.stride()


@pytest.mark.parametrize("steps", [1, 3])
def test_lists_of_casts(steps: int, device: torch.device) -> None:
    """Addresses change from call to call; a list of other sizes has a plan of its own."""
    from shardfuse.compile.cast_op import run_casts

    for source, result in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        kept: list[torch.Tensor] = []
        for k in range(steps):
            sizes = (1, 7, 8192, 8193, 1 << 20, 3_000_001)
            given = [torch.randn(n + k, device=device).to(source) for n in sizes]
            for _ in range(3):
                found = run_casts(given, result)
                kept += found
                for x, y in zip(given, found, strict=True):
                    assert torch.equal(y, x.to(result))
