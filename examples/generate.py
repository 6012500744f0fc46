"""An inference loop: a tensor-parallel decoder that generates tokens one by one, with caches of keys and values.

    scripts/launch.sh examples/generate.py

Behind each row-parallel matrix product, the all-reduce, the residual and the norm are one fusion, `AddRMSNorm`: one
kernel where NVLink joins the GPUs, in which the ranks exchange what they add up.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from shardfuse import DeviceMesh, initialize
from shardfuse.nn import AddRMSNorm

BATCH, PROMPT, LENGTH, HEAD_DIM, CLASSES, EPS = 4, 4, 36, 64, 256, 1e-6
Weights = dict[str, Tensor]


def matrices(like: dict[str, Any], **sizes: tuple[int, ...]) -> Weights:
    return {name: torch.randn(size, **like) / size[-1] ** 0.5 for name, size in sizes.items()}


class Layer(torch.nn.Module):
    """This rank's heads and hidden columns of a layer; each half ends with the norm of the next."""

    def __init__(self, whole: Weights, mesh: DeviceMesh) -> None:
        super().__init__()
        # "qkv" and "gate_up" are cut by what they make, "out" and "down" by what they read: all along axis 1.
        own = {name: mesh.shard_tensor(weight, 1) for name, weight in whole.items()}
        self.qkv, self.gate_up = own["qkv"].flatten(0, 1), own["gate_up"].flatten(0, 1)
        self.out, self.down = own["out"], own["down"]
        dim, width = self.out.shape
        like = {"device": self.out.device, "dtype": self.out.dtype}
        self.attention_norm, self.mlp_norm = (
            AddRMSNorm(dim, EPS, mesh=mesh, input=Partial(), residual=Replicate(), output=Replicate(), **like)
            for _ in range(2)
        )
        self.keys, self.values = torch.zeros(2, BATCH, width // HEAD_DIM, LENGTH, HEAD_DIM, **like)

    def forward(self, x: Tensor, residual: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """x: [BATCH, dim], normed, of the tokens at ``position``; residual: [BATCH, dim] -> those of the next layer."""
        query, key, value = (x @ self.qkv.T).view(BATCH, 3, -1, HEAD_DIM).unbind(1)
        self.keys[:, :, position], self.values[:, :, position] = key, value
        keys, values = self.keys[:, :, : position + 1], self.values[:, :, : position + 1]
        mixed = scaled_dot_product_attention(query[:, :, None], keys, values).flatten(1)
        x, residual = self.attention_norm(mixed @ self.out.T, residual)  # all-reduce, add, norm
        gate, up = (x @ self.gate_up.T).chunk(2, 1)
        return self.mlp_norm((silu(gate) * up) @ self.down.T, residual)


def unsharded(tables: Weights, layers: list[Weights], tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """The logits of all positions of tokens [BATCH, length], in plain torch, without caches."""
    embedding, positions = tables["embedding"].to(dtype), tables["positions"].to(dtype)
    residual = embedding[tokens] + positions[: tokens.shape[1]]
    dim = embedding.shape[1:]
    for layer in layers:
        weights = {name: weight.to(dtype) for name, weight in layer.items()}
        qkv = rms_norm(residual, dim, eps=EPS) @ weights["qkv"].flatten(0, 1).T
        query, key, value = qkv.unflatten(-1, (3, -1, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        residual = residual + mixed @ weights["out"].T
        gate, up = (rms_norm(residual, dim, eps=EPS) @ weights["gate_up"].flatten(0, 1).T).chunk(2, 2)
        residual = residual + (silu(gate) * up) @ weights["down"].T
    return rms_norm(residual, dim, eps=EPS) @ embedding.T


@torch.no_grad()
def main() -> None:
    world = initialize()
    mesh = DeviceMesh(range(world.world_size))
    dim, count, dtype = (2048, 16, torch.bfloat16) if world.device.type == "cuda" else (256, 2, torch.float32)
    like = {"device": world.device, "dtype": dtype}
    torch.manual_seed(0)  # the same weights and prompts on every rank
    tables = matrices(like, embedding=(CLASSES, dim), positions=(LENGTH, dim))
    sizes = {"qkv": (3, dim, dim), "out": (dim, dim), "gate_up": (2, 4 * dim, dim), "down": (dim, 4 * dim)}
    whole = [matrices(like, **sizes) for _ in range(count)]
    layers = [Layer(weights, mesh) for weights in whole]

    tokens, logits = torch.randint(CLASSES, (BATCH, LENGTH), device=world.device), []
    for position in range(LENGTH - 1):
        if position == PROMPT:
            tokens.sum().item()  # waits until the prompts have run, and with them all that compiles
            began = time.perf_counter()
        residual = tables["embedding"][tokens[:, position]] + tables["positions"][position]
        x = rms_norm(residual, (dim,), eps=EPS)
        for layer in layers:
            x, residual = layer(x, residual, position)
        logits.append(x @ tables["embedding"].T)
        if position + 1 >= PROMPT:
            tokens[:, position + 1] = logits[-1].argmax(1)
    tokens.sum().item()
    speed = BATCH * (LENGTH - 1 - PROMPT) / (time.perf_counter() - began)

    found, right = torch.stack(logits, 1), unsharded(tables, whole, tokens[:, :-1], torch.float64)
    eager = unsharded(tables, whole, tokens[:, :-1], dtype)
    error, rounding = (((x - right).abs().max() / right.abs().max()).item() for x in (found, eager))
    assert error <= 2 * rounding + torch.finfo(dtype).eps, f"off by {error:.1e}, eager torch by {rounding:.1e}"
    if world.rank == 0:
        how = f": ranks exchange by {world.exchange}" if world.exchange else ""
        print(f"{BATCH} sequences of {LENGTH} tokens on {mesh.size} x {world.device.type}{how}")
        print(f"logits differ from unsharded float64 torch by {error:.1e} (eager {dtype}: {rounding:.1e})")
        print(f"{speed:,.0f} tokens/s")


if __name__ == "__main__":
    main()
