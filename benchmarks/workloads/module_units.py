"""Activations, gates, softmax and the rotary embedding of ``shardfuse.nn`` beside the same in torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as theirs

from shardfuse import nn
from shardfuse.nn import functional

from ..called import Called, Function, called, function, module
from ..workload import Case, Draw, Tensors
from .module_norms import ROWS, TINY_ROWS, rows_and_vectors

SCORES = ("1x16x1024x1024", "4x16x2048x2048", "2x16x2048x2048:float32")
LOGITS = ("1024x8192", "8192x32000", "4096x32000:float32")
HEADS = ("1x16x1024x128", "4x32x4096x128", "4x32x2048x128:float32")


# gates and activations


def _gates() -> list[Called]:
    made: list[Called] = []
    for approximate in ("none", "tanh"):
        suffix = ", tanh" if approximate == "tanh" else ""
        of: dict[str, Any] = {"approximate": approximate}
        gelu = partial(theirs.gelu, **of)
        made += called(
            name=f"GELU{suffix}",
            title="gelu(x)",
            cases=ROWS,
            tiny=TINY_ROWS,
            arguments=rows_and_vectors(1),
            makes={
                "GELU": module(lambda case, of=of: nn.GELU(**of)),
                "functional.gelu": function(lambda case, x, of=of: functional.gelu(x, **of)),
            },
            forward=lambda case, x, gelu=gelu: gelu(x),
        )
        made += called(
            name=f"GeGLU{suffix}",
            title="gelu(gate) * up",
            cases=ROWS,
            tiny=TINY_ROWS,
            arguments=rows_and_vectors(2),
            makes={
                "GeGLU": module(lambda case, of=of: nn.GeGLU(**of)),
                "functional.geglu": function(lambda case, g, u, of=of: functional.geglu(g, u, **of)),
            },
            forward=lambda case, g, u, gelu=gelu: gelu(g) * u,
        )
    return made


def _halves(case: Case, both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return theirs.silu(gate) * up


SWIGLUS = (
    *called(
        name="SwiGLU",
        title="silu(gate) * up",
        cases=ROWS,
        tiny=TINY_ROWS,
        arguments=rows_and_vectors(2),
        makes={
            "SwiGLU": module(lambda case: nn.SwiGLU()),
            "functional.swiglu": function(lambda case, g, u: functional.swiglu(g, u)),
        },
        forward=lambda case, g, u: theirs.silu(g) * u,
    ),
    *called(
        name="SwiGLU of one tensor",
        title="silu(gate) * up, the halves of one tensor",
        cases=ROWS,
        tiny=TINY_ROWS,
        arguments=rows_and_vectors(1),
        makes={
            "SwiGLU": module(lambda case: nn.SwiGLU()),
            "functional.swiglu": function(lambda case, both: functional.swiglu(both)),
        },
        forward=_halves,
    ),
    *called(
        name="SwiGLU with biases",
        title="silu(gate + bias) * (up + bias)",
        cases=ROWS,
        tiny=TINY_ROWS,
        arguments=rows_and_vectors(2, 2),
        makes={"SwiGLU": module(lambda case: nn.SwiGLU(case.columns, bias=True), "gate_bias", "up_bias")},
        forward=lambda case, g, u, b, c: theirs.silu(g + b) * (u + c),
    ),
)


# softmax


def _masked(case: Case, draw: Draw) -> list[Tensor]:
    """Scores, and a mask that leaves each row its first elements, for all heads."""
    rows, columns = case.shape[-2:]
    x = draw.normal(case.shape, case.dtype)
    taken = torch.arange(columns, device=x.device) <= torch.arange(rows, device=x.device)[:, None]
    return [x, taken]


SOFTMAXES = (
    *called(
        name="Softmax",
        title="softmax(x)",
        cases=LOGITS,
        tiny=TINY_ROWS,
        arguments=rows_and_vectors(1),
        makes={
            "Softmax": module(lambda case: nn.Softmax(-1)),
            "functional.softmax": function(lambda case, x: functional.softmax(x, -1)),
        },
        forward=lambda case, x: theirs.softmax(x, -1),
    ),
    *called(
        name="Softmax, masked",
        title="softmax(x / 8), masked",
        cases=SCORES,
        tiny=("1x2x6x6", "2x1x5x5:float32"),
        arguments=_masked,
        makes={
            "Softmax": module(lambda case: nn.Softmax(-1, 0.125)),
            "functional.softmax": function(lambda case, x, mask: functional.softmax(x, -1, scale=0.125, mask=mask)),
        },
        forward=lambda case, x, mask: theirs.softmax((0.125 * x).masked_fill(~mask, -torch.inf), -1),
    ),
    *called(
        name="LogSoftmax",
        title="log_softmax(x)",
        cases=LOGITS,
        tiny=TINY_ROWS,
        arguments=rows_and_vectors(1),
        makes={
            "LogSoftmax": module(lambda case: nn.LogSoftmax(-1)),
            "functional.log_softmax": function(lambda case, x: functional.log_softmax(x, -1)),
        },
        forward=lambda case, x: theirs.log_softmax(x, -1),
    ),
)


# rotary embedding


def _angles(draw: Draw, sequence: int, features: int) -> list[Tensor]:
    positions = torch.arange(sequence, device=draw.device)
    return list(nn.RotaryEmbedding(features).tables(positions))


def _heads(case: Case, draw: Draw) -> list[Tensor]:
    """[batch, heads, sequence, features] of queries, and a quarter of the heads of keys; cosines and sines."""
    batch, heads, sequence, features = case.shape
    key = draw.normal((batch, max(heads // 4, 1), sequence, features), case.dtype)
    return [draw.normal(case.shape, case.dtype), key, *_angles(draw, sequence, features)]


def _packed_heads(case: Case, draw: Draw) -> list[Tensor]:
    """[batch, sequence, all heads * features]: heads of queries, and a quarter as many of keys and of values."""
    batch, heads, sequence, features = case.shape
    packed = (heads + 2 * max(heads // 4, 1)) * features
    return [draw.normal((batch, sequence, packed), case.dtype), *_angles(draw, sequence, features)]


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def _neighbours_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x.dtype)


def _unpacked(case: Case, x: Tensor, cos: Tensor, sin: Tensor) -> Tensors:
    heads, features = case.shape[1], case.shape[-1]
    keys = max(heads // 4, 1)
    parts = x.view(*x.shape[:2], -1, features).transpose(1, 2).split((heads, keys, keys), 1)
    return _turned(parts[0], cos, sin), _turned(parts[1], cos, sin), parts[2]


def _packed_module(case: Case, inputs: Sequence[Tensor]) -> Function:
    heads = case.shape[1]
    made = nn.RotaryEmbedding(case.shape[-1], packed=(heads, max(heads // 4, 1)))
    return lambda x, cos, sin: made(x, None, cos, sin)


def _interleaved(case: Case, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensors:
    return functional.rotary_embedding(q, k, cos, sin, interleaved=True)


ROTARY = (
    *called(
        name="RotaryEmbedding",
        title="queries and keys turned",
        cases=HEADS,
        tiny=("2x4x3x8", "1x4x5x8:float32"),
        arguments=_heads,
        makes={
            "RotaryEmbedding": module(lambda case: nn.RotaryEmbedding(case.shape[-1])),
            "functional.rotary_embedding": function(lambda case, *given: functional.rotary_embedding(*given)),
        },
        forward=lambda case, q, k, cos, sin: (_turned(q, cos, sin), _turned(k, cos, sin)),
        results=2,
        fixed=2,
    ),
    *called(
        name="RotaryEmbedding, interleaved",
        title="queries and keys turned, pairs being neighbours",
        cases=HEADS[:2],
        tiny=("2x4x3x8",),
        arguments=_heads,
        makes={
            "RotaryEmbedding": module(lambda case: nn.RotaryEmbedding(case.shape[-1], interleaved=True)),
            "functional.rotary_embedding": function(_interleaved),
        },
        forward=lambda case, q, k, cos, sin: (_neighbours_turned(q, cos, sin), _neighbours_turned(k, cos, sin)),
        results=2,
        fixed=2,
    ),
    *called(
        name="RotaryEmbedding, packed",
        title="queries, keys and values of one projection, the first two turned",
        cases=HEADS[:2],
        tiny=("2x4x3x8",),
        arguments=_packed_heads,
        makes={"RotaryEmbedding": _packed_module},
        forward=_unpacked,
        results=3,
        fixed=2,
        any_format=True,
    ),
)

WORKLOADS = (*_gates(), *SWIGLUS, *SOFTMAXES, *ROTARY)
