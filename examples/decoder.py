"""A decoder in plain torch, tensor-parallel by torch's `parallelize_module`, under `backend="shardfuse"`.

    scripts/launch.sh examples/decoder.py

The sums of partial results that tensor parallelism needs are in the compiled graph, so that an all-reduce, the residual
and the norm behind it are one fusion: one kernel where NVLink joins the GPUs.  On a CPU there is nothing to gain, and
the backend would take nothing; there the example asks for all of it, to have something to show.
"""

from __future__ import annotations

import copy
import time

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import shardfuse.compile

HEAD_DIM = 32


class Layer(nn.Module):
    """Causal attention with rotary positions, and a gated MLP; [batch, sequence, dim] -> the same."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(dim, 3 * dim, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm_1(x)
        q, k, v = (p(normed).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for p in (self.query, self.key, self.value))
        q, k = (t * cos + torch.cat((-t[..., HEAD_DIM // 2 :], t[..., : HEAD_DIM // 2]), -1) * sin for t in (q, k))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norm_2(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """Of bytes: 256 classes."""

    def __init__(self, dim: int, layers: int, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, 256, bias=False)
        angles = torch.arange(sequence)[:, None] * 1e4 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: [batch, sequence] -> the mean loss."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


PLAN = {
    **{f"layers.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "gate", "up")},
    **{f"layers.*.{name}": RowwiseParallel() for name in ("out", "down")},
}
"""Heads and hidden columns are divided among the ranks; all else is on every rank."""


def results(model: nn.Module, tokens: Tensor, targets: Tensor) -> list[Tensor]:
    """The loss, and the gradients of all weights."""
    loss = model(tokens, targets)
    loss.backward()
    found = [loss.detach(), *(weight.grad for weight in model.parameters())]
    model.zero_grad()
    return found


def distance(found: list[Tensor], right: list[Tensor]) -> float:
    """The largest difference, each as a share of its tensor's largest element."""
    found = [x.full_tensor() if isinstance(x, DTensor) else x for x in found]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, right, strict=True))


def main() -> None:
    world = shardfuse.initialize()
    on_gpu = world.device.type == "cuda"
    dim, layers, sequence, dtype = (2048, 4, 1024, torch.bfloat16) if on_gpu else (128, 1, 64, torch.float32)
    torch.manual_seed(0)  # the same weights and the same tokens on every rank
    model = Decoder(dim, layers, sequence).to(world.device, dtype)
    eager, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    text = torch.randint(256, (4, sequence + 1)).to(world.device)
    tokens, targets = text[:, :-1], text[:, 1:]

    parallelize_module(model, init_device_mesh(world.device.type, (world.world_size,)), PLAN)
    options = {"shardfuse.take": "auto" if on_gpu else "all"}
    compiled = torch.compile(model, backend="shardfuse", options=options)  # this line is all that shardfuse needs
    found, right = results(compiled, tokens, targets), results(wide, tokens, targets)
    error, rounding = distance(found, right), distance(results(eager, tokens, targets), right)
    assert error <= 2 * rounding + torch.finfo(dtype).eps, f"off by {error:.1e}, eager torch by {rounding:.1e}"

    began = time.perf_counter()
    for _ in range(10):
        last = results(compiled, tokens, targets)
    last[0].item()  # waits until all have run
    speed = 10 * tokens.numel() / (time.perf_counter() - began)
    if world.rank == 0:
        report = shardfuse.compile.report()
        sums = sum(line.endswith("inside") for region in report.taken for line in region.collectives)
        print(f"tensor-parallel decoder, forward and backward, on {world.world_size} x {world.device.type}")
        print(f"shardfuse computes {len(report.taken)} of {len(report.regions)} regions, {sums} all-reduces inside")
        print(f"loss and gradients differ from unsharded float64 torch by {error:.1e} (eager {dtype}: {rounding:.1e})")
        print(f"{speed:,.0f} tokens/s")


if __name__ == "__main__":
    main()
