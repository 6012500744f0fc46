"""A vision transformer in plain torch, forward and backward under `torch.compile(model, backend="shardfuse")`.

    scripts/launch.sh examples/vision_transformer.py     every rank has its part of the batch (DistributedDataParallel)
    python examples/vision_transformer.py                one rank

The backend is Inductor, except that norms, GELUs, the loss and what is around them are computed by shardfuse where that
is expected to be faster.  On a CPU it never is; there the example asks for all of them, to have something to show.
"""

from __future__ import annotations

import copy
import time

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import shardfuse.compile

PATCH, SIDE, CLASSES, HEADS = 8, 32, 10, 4


class Layer(nn.Module):
    """Attention and a GELU MLP of [images, patches, dim], each behind a norm and with a residual."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class VisionTransformer(nn.Module):
    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Linear(3 * PATCH**2, dim)
        self.positions = nn.Parameter(0.02 * torch.randn((SIDE // PATCH) ** 2, dim))
        self.layers = nn.Sequential(*(Layer(dim) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """images: [n, 3, SIDE, SIDE], labels: [n] -> their mean loss."""
        patches = functional.unfold(images, PATCH, stride=PATCH).transpose(1, 2)  # [n, patches, 3 * PATCH^2]
        x = self.norm(self.layers(self.patches(patches) + self.positions)).mean(1)
        return functional.cross_entropy(self.head(x), labels)


def gradients(model: nn.Module, images: Tensor, labels: Tensor) -> list[Tensor]:
    model(images, labels).backward()
    found = [weight.grad.detach() for weight in model.parameters()]
    model.zero_grad()
    return found


def distance(found: list[Tensor], right: list[Tensor]) -> float:
    """The largest difference, each as a share of its tensor's largest element."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, right, strict=True))


def main() -> None:
    world = shardfuse.initialize()
    on_gpu = world.device.type == "cuda"
    dim, layers, each, dtype = (1024, 12, 256, torch.bfloat16) if on_gpu else (64, 1, 16, torch.float32)
    torch.manual_seed(0)  # the same weights and the same whole batch on every rank
    model = VisionTransformer(dim, layers).to(world.device, dtype)
    eager, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    images = torch.randn(each * world.world_size, 3, SIDE, SIDE).to(world.device, dtype)
    labels = torch.randint(CLASSES, (len(images),)).to(world.device)

    options = {"shardfuse.take": "auto" if on_gpu else "all"}
    compiled = torch.compile(model, backend="shardfuse", options=options)  # this line is all that shardfuse needs
    compiled = DistributedDataParallel(compiled)  # averages gradients over the ranks
    own = slice(each * world.rank, each * (world.rank + 1))
    found = gradients(compiled, images[own], labels[own])
    right = gradients(wide, images.double(), labels)
    error, rounding = distance(found, right), distance(gradients(eager, images, labels), right)
    assert error <= 2 * rounding + torch.finfo(dtype).eps, f"off by {error:.1e}, eager torch by {rounding:.1e}"

    began = time.perf_counter()
    for _ in range(10):
        last = gradients(compiled, images[own], labels[own])
    last[0].sum().item()  # waits until all have run
    speed = 10 * len(images) / (time.perf_counter() - began)
    if world.rank == 0:
        report = shardfuse.compile.report()
        print(f"vision transformer, forward and backward, on {world.world_size} x {world.device.type}")
        print(f"shardfuse computes {len(report.taken)} of {len(report.regions)} regions")
        print(f"gradients differ from float64 torch on the whole batch by {error:.1e} (eager {dtype}: {rounding:.1e})")
        print(f"{speed:,.0f} images/s")


if __name__ == "__main__":
    main()
