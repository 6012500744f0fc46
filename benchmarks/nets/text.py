"""Language models: BERT, GPT-2, Qwen3 and Gemma3, op by op as in transformers, with its sdpa attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class TextConfig:
    """``kv_heads``: of keys and values; ``head_dim``: where it is not ``dim / heads``; ``dropout``: a probability."""

    dim: int
    layers: int
    heads: int
    hidden: int
    classes: int
    positions: int
    dropout: float = 0.1
    kv_heads: int = 0
    head_dim: int = 0


class SelfAttention(nn.Module):
    """Of BERT: three projections, dropout of probabilities, output, dropout, residual, norm."""

    def __init__(self, c: TextConfig) -> None:
        super().__init__()
        self.heads, self.dropout = c.heads, c.dropout
        self.query, self.key, self.value, self.out = (nn.Linear(c.dim, c.dim) for _ in range(4))
        self.norm = nn.LayerNorm(c.dim, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        mixed = self.out(mixed.transpose(1, 2).flatten(2))
        return self.norm(functional.dropout(mixed, self.dropout, self.training) + x)


class BertLayer(nn.Module):
    def __init__(self, c: TextConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(c)
        self.intermediate, self.output = nn.Linear(c.dim, c.hidden), nn.Linear(c.hidden, c.dim)
        self.dropout = nn.Dropout(c.dropout)
        self.norm = nn.LayerNorm(c.dim, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return self.norm(self.dropout(self.output(functional.gelu(self.intermediate(x)))) + x)


class Bert(nn.Module):
    """With the head that predicts masked words; targets of -100 are ignored."""

    def __init__(self, c: TextConfig) -> None:
        super().__init__()
        self.words, self.positions, self.types = (nn.Embedding(n, c.dim) for n in (c.classes, c.positions, 2))
        self.norm, self.dropout = nn.LayerNorm(c.dim, eps=1e-12), nn.Dropout(c.dropout)
        self.layers = nn.ModuleList(BertLayer(c) for _ in range(c.layers))
        self.transform, self.head_norm = nn.Linear(c.dim, c.dim), nn.LayerNorm(c.dim, eps=1e-12)
        self.head_bias = nn.Parameter(torch.zeros(c.classes))
        _initialise(self)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.types(torch.zeros_like(tokens)) + self.positions(places)
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = layer(x)
        x = self.head_norm(functional.gelu(self.transform(x)))
        logits = functional.linear(x, self.words.weight, self.head_bias)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Gpt2Block(nn.Module):
    def __init__(self, c: TextConfig) -> None:
        super().__init__()
        self.heads, self.dropout = c.heads, c.dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(c.dim), nn.LayerNorm(c.dim)
        self.qkv, self.out = nn.Linear(c.dim, 3 * c.dim), nn.Linear(c.dim, c.dim)
        self.up, self.down = nn.Linear(c.dim, c.hidden), nn.Linear(c.hidden, c.dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        p = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = functional.dropout(self.out(mixed.transpose(1, 2).flatten(2)), p, self.training) + x
        hidden = self.up(self.norm_2(x))
        inner = math.sqrt(2 / math.pi) * (hidden + 0.044715 * torch.pow(hidden, 3.0))
        hidden = self.down(0.5 * hidden * (1.0 + torch.tanh(inner)))
        return x + functional.dropout(hidden, p, self.training)


class Gpt2(nn.Module):
    """Its logits are in float32 for the loss, as transformers has it."""

    def __init__(self, c: TextConfig) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(c.classes, c.dim), nn.Embedding(c.positions, c.dim)
        self.dropout = nn.Dropout(c.dropout)
        self.layers = nn.ModuleList(Gpt2Block(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.dim)
        _initialise(self)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.words(tokens) + self.positions(places))
        for layer in self.layers:
            x = layer(x)
        return loss_of_next(functional.linear(self.norm(x), self.words.weight), targets)


class RmsNorm(nn.Module):
    """Of Qwen3; with ``plus_one`` of Gemma3, whose product is in float32."""

    def __init__(self, dim: int, *, plus_one: bool) -> None:
        super().__init__()
        self.plus_one = plus_one
        self.weight = nn.Parameter(torch.zeros(dim) if plus_one else torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        if self.plus_one:
            return (wide * (1.0 + self.weight.float())).type_as(x)
        return self.weight * wide.to(x.dtype)


class GroupedAttention(nn.Module):
    """Heads are normed and rotated."""

    def __init__(self, c: TextConfig, *, plus_one: bool) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.query, self.out = (
            nn.Linear(c.dim, c.heads * c.head_dim, bias=False),
            nn.Linear(c.heads * c.head_dim, c.dim, bias=False),
        )
        self.key, self.value = (nn.Linear(c.dim, c.kv_heads * c.head_dim, bias=False) for _ in range(2))
        self.query_norm, self.key_norm = (RmsNorm(c.head_dim, plus_one=plus_one) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.query, self.key, self.value))
        q, k = (_rotated(t.transpose(1, 2), cos, sin) for t in (self.query_norm(q), self.key_norm(k)))
        mixed = functional.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class DecoderLayer(nn.Module):
    """Of Qwen3; of Gemma3 there are norms behind attention and MLP too."""

    def __init__(self, c: TextConfig, *, gemma: bool) -> None:
        super().__init__()
        self.gemma = gemma
        self.attention = GroupedAttention(c, plus_one=gemma)
        self.gate, self.up = (nn.Linear(c.dim, c.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(c.hidden, c.dim, bias=False)
        self.norms = nn.ModuleList(RmsNorm(c.dim, plus_one=gemma) for _ in range(4 if gemma else 2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        mixed = self.attention(self.norms[0](x), cos, sin)
        x = x + (self.norms[2](mixed) if self.gemma else mixed)
        normed = self.norms[1](x)
        gate = self.gate(normed)
        hidden = functional.gelu(gate, approximate="tanh") if self.gemma else functional.silu(gate)
        found = self.down(hidden * self.up(normed))
        return x + (self.norms[3](found) if self.gemma else found)


class Decoder(nn.Module):
    """Layers of Qwen3 or Gemma3 between their embedding and its transpose."""

    def __init__(self, c: TextConfig, *, gemma: bool) -> None:
        super().__init__()
        self.scale = math.sqrt(c.dim) if gemma else 1.0
        self.words = nn.Embedding(c.classes, c.dim)
        self.layers = nn.ModuleList(DecoderLayer(c, gemma=gemma) for _ in range(c.layers))
        self.norm = RmsNorm(c.dim, plus_one=gemma)
        frequencies = 1e6 ** (-torch.arange(0, c.head_dim, 2) / c.head_dim)
        angles = torch.outer(torch.arange(c.positions), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        _initialise(self)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.words(tokens) * self.scale
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return loss_of_next(functional.linear(self.norm(x), self.words.weight), targets)


def loss_of_next(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)


def _initialise(model: nn.Module) -> None:
    """Normal, of deviation 0.02, as all of these have it."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
