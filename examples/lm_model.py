"""A decoder-only transformer over bytes, twice: sharded over a device mesh, and whole in plain torch.

The sharded one is tensor parallel in the blocks and sequence parallel between them.  A rank holds some attention heads
and some columns of the MLP, whose matmuls leave partial sums [sequence, batch, dim]; `AddRMSNorm` reduces those onto
the rank's part of the sequence, adds bias and residual, norms, and gathers the whole sequence for the next matmul.
The sequence is the first dim, so that a rank's part of it is one piece of memory, which is sent as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn import functional

from shardfuse import DeviceMesh
from shardfuse.nn import (
    AddRMSNorm,
    CrossEntropyLoss,
    FusionTimer,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    bucket_gradients,
    redistribute,
)
from shardfuse.nn.functional import embedding

# The dim along which a parameter is sharded, by the last part of its name; all others are replicated.
SHARDED_DIM = {"qkv": 1, "out": 1, "gate_up": 1, "down": 1, "head": 0, "gate_bias": 0, "up_bias": 0}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model, unsharded."""

    dim: int
    layers: int
    heads: int
    hidden: int
    sequence: int
    vocabulary: int = 256

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def sharded_sizes(self) -> dict[str, int]:
        """What the number of ranks has to divide."""
        return {"heads": self.heads, "hidden": self.hidden, "sequence": self.sequence, "vocabulary": self.vocabulary}


class Block(torch.nn.Module):
    """This rank's heads and MLP columns of one layer, and the norm that follows each of the two halves."""

    def __init__(self, config: ModelConfig, mesh: DeviceMesh) -> None:
        super().__init__()
        heads, hidden = config.heads // mesh.size, config.hidden // mesh.size
        # Matrices, as matmuls take them: a view in each step would cost the host two nodes of autograd.
        self.qkv = parameter(3 * heads * config.head_dim, config.dim)
        self.out = parameter(config.dim, heads * config.head_dim)
        self.gate_up = parameter(2 * hidden, config.dim)
        self.down = parameter(config.dim, hidden)
        # Of this rank's heads alone, so that no mesh is needed.  It reads what the qkv matmul made, and its backward
        # gives that matmul's gradient as one tensor.
        self.turn = RotaryEmbedding(config.head_dim, packed=(heads, heads), batch_first=False)
        # Weights of matmuls are plain tensors here, this rank's pieces.  torch's optimisers take no mixture with
        # DTensors, so the modules' parameters are plain too ("local").
        self.swiglu = SwiGLU(config.hidden, bias=True, mesh=mesh, input=Shard(-1), parameters="local")
        self.attention_norm, self.mlp_norm = (
            AddRMSNorm(
                config.dim,
                bias=True,
                mesh=mesh,
                input=Partial(),  # what a row-parallel matmul leaves
                residual=Shard(0),  # [sequence, batch, dim]: the sequence
                output=Replicate(),  # what a column-parallel matmul takes
                output_grad=Partial(),
                parameters="local",
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor, residual: Tensor, rotary: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """x: [sequence, batch, dim], normed; residual: [sequence / ranks, batch, dim] -> those of the next block.

        rotary: cosines and sines, [sequence, head_dim / 2] each.
        """
        cos, sin = rotary
        # Each matmul with the module that reads what it makes: one node of autograd instead of two.
        mixed = attended(*self.turn.of_linear(x, self.qkv, cos=cos, sin=sin))  # [batch, heads, sequence, head_dim]
        x, residual = self.attention_norm.of_linear(mixed.permute(2, 0, 1, 3).flatten(2), self.out, residual)
        gated = self.swiglu.of_linear(x, self.gate_up)
        return self.mlp_norm.of_linear(gated, self.down, residual)


class LanguageModel(torch.nn.Module):
    """The model on a 1-D mesh.  ``dtype`` is that of matmuls and activations; parameters stay float32."""

    def __init__(self, config: ModelConfig, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.sequence, self.dtype = mesh, config.sequence, torch.float32
        self.sizes = sizes_of(config)
        self.embedding = parameter(config.vocabulary, config.dim)
        self.norm = RMSNorm(
            config.dim, mesh=mesh, input=Shard(0), output=Replicate(), output_grad=Partial(), parameters="local"
        )
        self.blocks = torch.nn.ModuleList(Block(config, mesh) for _ in range(config.layers))
        self.head = parameter(config.vocabulary // mesh.size, config.dim)
        self.loss = CrossEntropyLoss(mesh=mesh, logits=Shard(-1))
        self.register_buffer("rotary", rotary_table(config), persistent=False)
        self.timer: FusionTimer | None = None
        """Times the fusions, where it is set."""
        bucket_gradients(self)  # one all-reduce for all norms' weights, whose rows are sharded

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: [batch, sequence], the same on every rank -> the mean loss, the same on every rank."""
        x = embedding(tokens.t(), self.embedding, self.dtype)
        residual = redistribute(x, self.mesh, Replicate(), Shard(0), timer=self.timer)
        x = self.norm(residual)
        rotary = self.rotary.unbind(0)
        for block in self.blocks:
            x, residual = block(x, residual, rotary)
        return self.loss.of_linear(x, self.head, targets.t())

    @torch.no_grad()
    def load_unsharded(self, weights: dict[str, Tensor]) -> None:
        """Take this rank's piece of every weight of a whole model."""
        for name, weight in self.named_parameters():
            weight.copy_(self.shard(name, weights[name]))

    def shard(self, name: str, whole: Tensor) -> Tensor:
        """This rank's piece of the parameter ``name``, or of anything of its shape, as this model has it."""
        dim = sharded_dim(name)
        return whole if dim is None else self.mesh.shard_tensor(whole, dim).reshape(self.get_parameter(name).shape)

    def gather(self, name: str, piece: Tensor) -> Tensor:
        """The whole of the parameter ``name`` (or of anything of its shape) from all ranks' pieces, on every rank."""
        dim = sharded_dim(name)
        if dim is None:
            return piece
        sizes = list(self.sizes.get(name.rpartition(".")[2], ()))
        if sizes:
            sizes[dim] //= self.mesh.size
            piece = piece.view(sizes)
        return redistribute(piece, self.mesh, Shard(dim), Replicate())


class UnshardedBlock(torch.nn.Module):
    """One layer in plain torch.  Its parameters have the names of ``Block``'s."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        sizes = sizes_of(config)
        self.qkv, self.out, self.gate_up = (parameter(*sizes[name]) for name in ("qkv", "out", "gate_up"))
        self.down = parameter(config.dim, config.hidden)
        self.swiglu = torch.nn.ParameterDict(
            {"gate_bias": parameter(config.hidden), "up_bias": parameter(config.hidden)}
        )
        self.attention_norm, self.mlp_norm = (
            torch.nn.ParameterDict({"weight": parameter(config.dim), "input_bias": parameter(config.dim)})
            for _ in range(2)
        )

    def forward(self, x: Tensor, residual: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        projected = plain_linear(x, self.qkv.flatten(0, 2)).unflatten(-1, self.qkv.shape[:3])
        q, k, v = projected.unbind(2)  # each [batch, sequence, heads, head_dim]
        by_heads = [t.transpose(1, 2) for t in (rotate(q, rotary), rotate(k, rotary), v)]
        mixed = plain_linear(attended(*by_heads).transpose(1, 2).flatten(2), self.out.flatten(1))
        residual = residual + mixed + self.attention_norm["input_bias"]
        x = rms_norm(residual, self.attention_norm["weight"])
        gate, up = plain_linear(x, self.gate_up.flatten(0, 1)).chunk(2, dim=-1)
        x = functional.silu(gate + self.swiglu["gate_bias"]) * (up + self.swiglu["up_bias"])
        residual = residual + plain_linear(x, self.down) + self.mlp_norm["input_bias"]
        return rms_norm(residual, self.mlp_norm["weight"]), residual


class UnshardedLanguageModel(torch.nn.Module):
    """The same model whole, in plain torch: where the weights come from, and what ``--check`` compares with."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        super().__init__()
        self.embedding = parameter(config.vocabulary, config.dim)
        self.norm = torch.nn.ParameterDict({"weight": parameter(config.dim)})
        self.blocks = torch.nn.ModuleList(UnshardedBlock(config) for _ in range(config.layers))
        self.head = parameter(config.vocabulary, config.dim)
        self.register_buffer("rotary", rotary_table(config), persistent=False)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                is_branch_end = name.endswith((".out", ".down"))
                scale = (2 * config.layers) ** -0.5 if is_branch_end else 1.0
                torch.nn.init.normal_(weight, std=0.02 * scale, generator=generator)
            else:
                torch.nn.init.constant_(weight, 1.0 if name.endswith("weight") else 0.0)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        residual = functional.embedding(tokens, self.embedding)
        x = rms_norm(residual, self.norm["weight"])
        for block in self.blocks:
            x, residual = block(x, residual, self.rotary)
        return functional.cross_entropy(plain_linear(x, self.head).flatten(0, 1), targets.flatten())


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of [batch, heads, sequence, head_dim], whose result is stored as the queries are."""
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def sizes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Unsharded sizes of the weights that are sharded along a dim of their own, such as the heads of ``qkv``."""
    return {
        "qkv": (3, config.heads, config.head_dim, config.dim),
        "out": (config.dim, config.heads, config.head_dim),
        "gate_up": (2, config.hidden, config.dim),
    }


def rotary_table(config: ModelConfig) -> Tensor:
    """[2, sequence, head_dim / 2]: cosine and sine of the angle by which a position turns each pair."""
    frequencies = 10_000.0 ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
    angles = torch.arange(config.sequence)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + head_dim / 2]) of x [batch, sequence, heads, head_dim]."""
    cos, sin = rotary.to(x.dtype)[:, :, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def plain_linear(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x, weight.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps=1e-6)


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape))


def sharded_dim(name: str) -> int | None:
    return SHARDED_DIM.get(name.rpartition(".")[2])
