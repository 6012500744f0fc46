"""Losses and layers of ``shardfuse.nn`` beside torch's, forward and forward + backward."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as theirs

from shardfuse import nn
from shardfuse.nn import functional

from ..called import Called, called, function, module
from ..workload import Case, Draw, Tensors
from .module_norms import TINY_ROWS
from .module_units import LOGITS

LAYERS = ("1024x1024", "8192x4096")
SMOOTHING = 0.1
TEMPERATURE = 0.7
WIDER = 4
"""Features of a layer's result, as many times those that it is given."""
CLASSES = 32000
TABLE_ROWS = 32000


def _wide(x: Tensor) -> Tensor:
    """In the dtype in which losses are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _logits(case: Case, draw: Draw) -> list[Tensor]:
    return [draw.normal(case.shape, case.dtype), draw.integers(case.shape[:1], case.columns)]


def _log_prob(case: Case, x: Tensor, target: Tensor) -> Tensor:
    return theirs.log_softmax(_wide(x) / TEMPERATURE, -1).gather(-1, target[:, None])[:, 0]


def _with_entropy(case: Case, x: Tensor, target: Tensor) -> Tensors:
    logs = theirs.log_softmax(_wide(x) / TEMPERATURE, -1)
    return logs.gather(-1, target[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def _cross_entropy(case: Case, x: Tensor, target: Tensor) -> Tensor:
    return theirs.cross_entropy(_wide(x), target)


def _smoothed(case: Case, x: Tensor, target: Tensor) -> Tensor:
    return theirs.cross_entropy(_wide(x), target, label_smoothing=SMOOTHING)


LOSSES = (
    *called(
        name="CrossEntropyLoss",
        title="the mean cross entropy",
        cases=LOGITS,
        tiny=TINY_ROWS,
        arguments=_logits,
        makes={
            "CrossEntropyLoss": module(lambda case: nn.CrossEntropyLoss()),
            "functional.cross_entropy": function(lambda case, x, t: functional.cross_entropy(x, t)),
        },
        forward=_cross_entropy,
        roundings=4,
    ),
    *called(
        name="CrossEntropyLoss, smoothed",
        title="the mean cross entropy of smoothed labels",
        cases=LOGITS,
        tiny=TINY_ROWS,
        arguments=_logits,
        makes={"CrossEntropyLoss": module(lambda case: nn.CrossEntropyLoss(label_smoothing=SMOOTHING))},
        forward=_smoothed,
        roundings=4,
    ),
    *called(
        name="LogProb",
        title="the log-probability of each row's target",
        cases=LOGITS,
        tiny=TINY_ROWS,
        arguments=_logits,
        makes={
            "LogProb": module(lambda case: nn.LogProb(temperature=TEMPERATURE)),
            "functional.log_prob": function(lambda case, x, t: functional.log_prob(x, t, temperature=TEMPERATURE)),
        },
        forward=_log_prob,
        roundings=4,
    ),
    *called(
        name="LogProb, entropy",
        title="the log-probability of each row's target, and the entropy",
        cases=LOGITS,
        tiny=TINY_ROWS,
        arguments=_logits,
        makes={
            "LogProb": module(lambda case: nn.LogProb(temperature=TEMPERATURE, entropy=True)),
            "functional.log_prob_and_entropy": function(
                lambda case, x, t: functional.log_prob_and_entropy(x, t, temperature=TEMPERATURE)
            ),
        },
        forward=_with_entropy,
        results=2,
        roundings=4,
    ),
)


# layers


def _layer(case: Case, draw: Draw) -> list[Tensor]:
    """x, and a weight and a bias in float32."""
    wider = WIDER * case.columns
    weight = draw.normal((wider, case.columns), torch.float32) / case.columns**0.5
    return [draw.normal(case.shape, case.dtype), weight, draw.normal((wider,), torch.float32)]


def _linear(case: Case, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return theirs.linear(x, weight.to(x.dtype), bias.to(x.dtype))


def _mlp(case: Case, draw: Draw) -> list[Tensor]:
    """x, and the weights of its three layers."""
    wider = WIDER * case.columns
    shapes = ((wider, case.columns), (wider, case.columns), (case.columns, wider))
    weights = [draw.normal(shape, case.dtype) / shape[1] ** 0.5 for shape in shapes]
    return [draw.normal(case.shape, case.dtype), *weights]


def _gated_mlp(case: Case) -> nn.GatedMLP:
    wider = WIDER * case.columns
    shapes = ((case.columns, wider), (case.columns, wider), (wider, case.columns))
    return nn.GatedMLP(*(torch.nn.Linear(*shape, bias=False) for shape in shapes))


def _of_classes(case: Case, draw: Draw) -> list[Tensor]:
    """x, the weight that makes logits of it, and targets."""
    classes = min(CLASSES, 8 * case.columns)
    weight = draw.normal((classes, case.columns), case.dtype) / case.columns**0.5
    return [draw.normal(case.shape, case.dtype), weight, draw.integers(case.shape[:1], classes)]


def _table(case: Case, draw: Draw) -> list[Tensor]:
    """A table in float32, and numbers of its rows."""
    rows = TABLE_ROWS if draw.device.type == "cuda" else 50
    return [draw.normal((rows, case.columns), torch.float32), draw.integers(case.shape[:1], rows)]


LAYERS_OF_ALL = (
    *called(
        name="Linear",
        title="x @ weight.T + bias, of float32 parameters",
        cases=LAYERS,
        tiny=("5x16",),
        arguments=_layer,
        makes={
            "Linear": module(lambda case: nn.Linear(case.columns, WIDER * case.columns), "weight", "bias"),
            "functional.linear": function(lambda case, *given: functional.linear(*given)),
        },
        forward=_linear,
        multiplies=True,
    ),
    *called(
        name="GatedMLP",
        title="down(silu(gate(x)) * up(x))",
        cases=LAYERS,
        tiny=("5x16",),
        arguments=_mlp,
        makes={"GatedMLP": module(_gated_mlp, "gate_proj.weight", "up_proj.weight", "down_proj.weight")},
        forward=lambda case, x, g, u, d: theirs.linear(theirs.silu(theirs.linear(x, g)) * theirs.linear(x, u), d),
        multiplies=True,
    ),
    *called(
        name="LinearCrossEntropyLoss",
        title="the mean cross entropy of x @ weight.T",
        cases=LAYERS,
        tiny=("5x16",),
        arguments=_of_classes,
        makes={
            "LinearCrossEntropyLoss": module(lambda case: nn.LinearCrossEntropyLoss()),
            "functional.linear_cross_entropy": function(lambda case, *given: functional.linear_cross_entropy(*given)),
        },
        forward=lambda case, x, w, t: theirs.cross_entropy(_wide(theirs.linear(x, w)), t),
        multiplies=True,
        roundings=4,
    ),
    *called(
        name="embedding",
        title="rows of a float32 table",
        cases=("2048x1024", "16384x4096"),
        tiny=("5x16",),
        arguments=_table,
        makes={"functional.embedding": function(lambda case, w, t: functional.embedding(t, w, case.dtype))},
        forward=lambda case, w, t: theirs.embedding(t, w).to(case.dtype),
        multiplies=True,
    ),
)
WORKLOADS: tuple[Called, ...] = (*LOSSES, *LAYERS_OF_ALL)
