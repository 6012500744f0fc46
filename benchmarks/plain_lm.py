"""The main job's model in plain torch, tensor and sequence parallel by functional collectives, as Megatron orders them.

Between matmuls the sequence is sharded: all-gather, column-parallel matmul, row-parallel matmul, reduce-scatter, add,
norm.  It is the first dim, as Megatron has it, so that nothing is copied for a collective.  The loss is a cross entropy
over a sharded vocabulary.  Nothing in it is shardfuse's: it is what a training
script has without, eager or under ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional


class VocabularyParallelLoss(torch.autograd.Function):
    """The mean cross entropy of logits [tokens, classes / ranks]: three all-reduces of a number a token forward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int) -> Tensor:
        world = dist.group.WORLD
        largest = collectives.all_reduce(logits.amax(-1).float(), "max", world)
        shifted = logits.float() - largest[:, None]
        total = collectives.all_reduce(shifted.exp().sum(-1), "sum", world)
        local = targets - first
        inside = (local >= 0) & (local < logits.shape[1])
        local = torch.where(inside, local, 0)
        picked = shifted.gather(1, local[:, None])[:, 0] * inside
        picked = collectives.all_reduce(picked, "sum", world)
        ctx.save_for_backward(logits, largest, total, local, inside)
        return (total.log() - picked).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, largest, total, local, inside = ctx.saved_tensors
        share = (logits.float() - largest[:, None]).exp() / total[:, None]
        share = share.scatter_add(1, local[:, None], -inside[:, None].float())
        return (share * (gradient / len(total))).to(logits.dtype), None, None


class PlainBlock(torch.nn.Module):
    """One layer.  Its parameters have the names and local shapes of `lm_model.Block`'s."""

    def __init__(self, names: Sequence[str], weights: dict[str, Tensor]) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(weights[name].clone()))

    def forward(self, x: Tensor, residual: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """x: [batch, sequence, dim], normed; residual: this rank's part of the sequence."""
        mixed = attention(x, self.qkv, self.out, rotary)
        residual = residual + scatter(mixed) + self.attention_norm_input_bias.to(x.dtype)
        x = gather(norm(residual, self.attention_norm_weight))
        gate, up = linear(x, self.gate_up).chunk(2, dim=-1)
        dtype = x.dtype
        hidden = functional.silu(gate + self.swiglu_gate_bias.to(dtype)) * (up + self.swiglu_up_bias.to(dtype))
        residual = residual + scatter(linear(hidden, self.down)) + self.mlp_norm_input_bias.to(x.dtype)
        return gather(norm(residual, self.mlp_norm_weight)), residual


class PlainModel(torch.nn.Module):
    """The whole model on this rank's weights.  replicated: the parameters whose gradients are summed over the ranks."""

    def __init__(self, layers: int, weights: dict[str, Tensor], rotary: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.embedding = torch.nn.Parameter(weights["embedding"].clone())
        self.norm_weight = torch.nn.Parameter(weights["norm.weight"].clone())
        self.head = torch.nn.Parameter(weights["head"].clone())
        inner = [name.split(".", 2)[2] for name in weights if name.startswith("blocks.0.")]
        self.blocks = torch.nn.ModuleList(
            PlainBlock(inner, {name: weights[f"blocks.{k}.{name}"] for name in inner}) for k in range(layers)
        )
        self.register_buffer("rotary", rotary, persistent=False)

    @property
    def replicated(self) -> list[torch.nn.Parameter]:
        norms = [p for name, p in self.blocks.named_parameters() if "_norm_" in name]
        return [self.norm_weight, *norms]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: [batch, sequence], the same on every rank; activations: [sequence, batch, dim]."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        whole = functional.embedding(tokens.t(), self.embedding).to(self.dtype)
        residual = Part.apply(whole, rank, ranks)
        x = gather(norm(residual, self.norm_weight))
        for block in self.blocks:
            x, residual = block(x, residual, self.rotary)
        logits = linear(x, self.head).flatten(0, 1)
        return VocabularyParallelLoss.apply(logits, targets.t().flatten(), rank * logits.shape[1])

    def reduce_small_gradients(self) -> None:
        """One all-reduce for the gradients of all norms, which each rank has of its part of the sequence."""
        gradients = [p.grad for p in self.replicated]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        parts = flat.split([g.numel() for g in gradients])
        torch._foreach_copy_(gradients, [p.view_as(g) for p, g in zip(parts, gradients, strict=True)])


class Part(torch.autograd.Function):
    """This rank's part of the sequence; the gradient is the whole sequence's, gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int, ranks: int) -> Tensor:
        # No view, as which it gets a gradient of zeros from torch.compile (torch 2.11, one rank).
        return x.chunk(ranks, 0)[rank].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return collectives.all_gather_tensor(gradient.contiguous(), 0, dist.group.WORLD), None, None


def gather(x: Tensor) -> Tensor:
    """[sequence / ranks, batch, dim] -> [sequence, batch, dim]; gradients are reduce-scattered."""
    return collectives.all_gather_tensor_autograd(x, 0, dist.group.WORLD)


def scatter(x: Tensor) -> Tensor:
    """Partial sums [sequence, batch, dim] -> this rank's part of their sum; gradients are gathered."""
    return collectives.reduce_scatter_tensor_autograd(x, "sum", 0, dist.group.WORLD)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight.to(x.dtype), eps=1e-6)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x, weight.to(x.dtype))


def attention(x: Tensor, qkv: Tensor, out: Tensor, rotary: Tensor) -> Tensor:
    """As `lm_model.Block` has it.  qkv: [3 * heads * head_dim, dim]; out: [dim, heads * head_dim]."""
    projected = linear(x, qkv).unflatten(-1, (3, -1, 2 * rotary.shape[-1]))
    q, k, v = projected.permute(2, 1, 3, 0, 4)  # each [batch, heads, sequence, head_dim]
    mixed = functional.scaled_dot_product_attention(rotate(q, rotary), rotate(k, rotary), v, is_causal=True)
    return linear(mixed.permute(2, 0, 1, 3).flatten(2), out)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    cos, sin = rotary.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
