"""The norms of ``shardfuse.nn`` beside torch's, forward and forward + backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as theirs

from shardfuse import nn
from shardfuse.nn import functional

from ..called import Called, Function, called, function, module
from ..workload import EPS, Case, Draw, Tensors

ROWS = ("2048x1024", "16384x8192", "16384x4096:float32")
TINY_ROWS = ("5x16", "4x24:float32")
IMAGES = ("2x320x32x32", "8x320x128x128", "4x320x128x128:float32")
TINY_IMAGES = ("2x64x3x4", "3x32x4x2:float32")
VOLUMES = ("2x64x8x16x16", "4x64x32x64x64")
DROPPED = 0.1
"""Share of what dropout drops."""


def rows_and_vectors(rows: int, vectors: int = 0) -> Callable[[Case, Draw], list[Tensor]]:
    """So many tensors of the case's shape, and so many vectors along its last axis."""

    def arguments(case: Case, draw: Draw) -> list[Tensor]:
        tensors = [draw.normal(case.shape, case.dtype) for _ in range(rows)]
        return [*tensors, *(draw.normal(case.shape[-1:], case.dtype) for _ in range(vectors))]

    return arguments


# norms of rows


def _rms(total: Tensor, weight: Tensor) -> Tensor:
    return theirs.rms_norm(total, weight.shape, weight, EPS)


def _layer(total: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return theirs.layer_norm(total, weight.shape, weight, bias, EPS)


def _dropped(case: Case, draw: Draw) -> list[Tensor]:
    """What is dropped of zeros is not to be seen in the results; the kernel draws and reads all the same."""
    x, *others = rows_and_vectors(2, 2)(case, draw)
    return [torch.zeros_like(x), *others]


def _dropout_add_norm(case: Case, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensors:
    total = residual + theirs.dropout(x, DROPPED)
    return _layer(total, weight, bias), total


def _without_drawn(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of x is the residual's over what is kept, or 0 where it was dropped, which is drawn."""
    if len(outputs) < 4:
        return list(outputs)
    normed, total, d_x, d_residual, *others = outputs
    kept = torch.where(d_x == 0, d_residual / (1 - DROPPED), d_x)
    return [normed, total, kept, d_residual, *others]


ROW_NORMS = (
    *called(
        name="RMSNorm",
        title="rms_norm(x) * weight",
        cases=ROWS,
        tiny=TINY_ROWS,
        arguments=rows_and_vectors(1, 1),
        makes={
            "RMSNorm": module(lambda case: nn.RMSNorm(case.columns, EPS), "weight"),
            "functional.rms_norm": function(lambda case, x, w: functional.rms_norm(x, w.shape, w, EPS)),
        },
        forward=lambda case, x, w: _rms(x, w),
    ),
    *called(
        name="AddRMSNorm",
        title="rms_norm(residual + x) * weight, and the sum",
        cases=ROWS,
        tiny=TINY_ROWS,
        arguments=rows_and_vectors(2, 1),
        makes={
            "AddRMSNorm": module(lambda case: nn.AddRMSNorm(case.columns, EPS), "weight"),
            "functional.add_rms_norm": function(lambda case, x, r, w: functional.add_rms_norm(x, r, w.shape, w, EPS)),
        },
        forward=lambda case, x, r, w: (_rms(r + x, w), r + x),
        results=2,
    ),
    *called(
        name="LayerNorm",
        title="layer_norm(x) * weight + bias",
        cases=ROWS,
        tiny=TINY_ROWS,
        arguments=rows_and_vectors(1, 2),
        makes={
            "LayerNorm": module(lambda case: nn.LayerNorm(case.columns, EPS), "weight", "bias"),
            "functional.layer_norm": function(lambda case, x, w, b: functional.layer_norm(x, w.shape, w, b, EPS)),
        },
        forward=lambda case, x, w, b: _layer(x, w, b),
    ),
    *called(
        name="AddLayerNorm",
        title="layer_norm(residual + x) * weight + bias, and the sum",
        cases=ROWS,
        tiny=TINY_ROWS,
        arguments=rows_and_vectors(2, 2),
        makes={
            "AddLayerNorm": module(lambda case: nn.AddLayerNorm(case.columns, EPS), "weight", "bias"),
            "functional.add_layer_norm": function(
                lambda case, x, r, w, b: functional.add_layer_norm(x, r, w.shape, w, b, EPS)
            ),
        },
        forward=lambda case, x, r, w, b: (_layer(r + x, w, b), r + x),
        results=2,
    ),
    *called(
        name="DropoutAddNorm",
        title="layer_norm(residual + dropout(x)) * weight + bias, and the sum",
        cases=ROWS,
        tiny=TINY_ROWS,
        arguments=_dropped,
        makes={
            "DropoutAddNorm": module(lambda case: nn.DropoutAddNorm(case.columns, DROPPED, EPS), "weight", "bias"),
            "functional.dropout_add_norm": function(
                lambda case, x, r, w, b: functional.dropout_add_norm(x, r, w.shape, w, b, p=DROPPED, eps=EPS)
            ),
        },
        forward=_dropout_add_norm,
        results=2,
        shown=_without_drawn,
    ),
)


# norms of images


def _image(vectors: int) -> Callable[[Case, Draw], list[Tensor]]:
    """In the case's memory format, and so many numbers for each channel."""

    def arguments(case: Case, draw: Draw) -> list[Tensor]:
        x = case.arranged(draw.normal(case.shape, case.dtype))
        return [x, *(draw.normal(case.shape[1:2], case.dtype) for _ in range(vectors))]

    return arguments


def _with_statistics(case: Case, draw: Draw) -> list[Tensor]:
    """x, weight, bias, and running statistics."""
    channels = case.shape[1:2]
    mean = draw.normal(channels, case.dtype)
    return [*_image(2)(case, draw), mean, draw.normal(channels, case.dtype).square() + 0.5]


def _batch_norm(training: bool) -> Function:
    return lambda case, x, w, b, mean, var: theirs.batch_norm(x, mean, var, w, b, training, 0.1, EPS)


def _own_batch_norm(training: bool) -> Function:
    return lambda case, x, w, b, mean, var: functional.batch_norm(x, mean, var, w, b, training, 0.1, EPS)


def _batch_norms() -> list[Called]:
    statistics = ("weight", "bias", "running_mean", "running_var")
    kinds = (
        (nn.BatchNorm2d, IMAGES, TINY_IMAGES),
        (nn.BatchNorm1d, ROWS, TINY_ROWS),
        (nn.BatchNorm3d, VOLUMES, ("2x8x3x2x4",)),
    )
    made: list[Called] = []
    for kind, cases, tiny in kinds:
        for training in (True, False) if kind is nn.BatchNorm2d else (True,):
            build = lambda case, kind=kind, training=training: kind(case.shape[1], EPS).train(training)  # noqa: E731
            makes = {kind.__name__: module(build, *statistics)}
            if kind is nn.BatchNorm2d:
                makes["functional.batch_norm"] = function(_own_batch_norm(training))
            made += called(
                name=kind.__name__ + ("" if training else ", eval"),
                title="batch_norm(x) * weight + bias" + ("" if training else ", by running statistics"),
                cases=(*cases, *(f"{c}:channels_last" for c in cases[:2])) if kind is nn.BatchNorm2d else cases,
                tiny=(*tiny, f"{tiny[0]}:channels_last") if kind is nn.BatchNorm2d else tiny,
                arguments=_with_statistics,
                makes=makes,
                forward=_batch_norm(training),
                fixed=2,
                roundings=4,
            )
    return made


def _group_norms() -> list[Called]:
    made: list[Called] = []
    for name, activation in (("GroupNorm", None), ("GroupNorm, SiLU", "silu")):
        after = theirs.silu if activation else (lambda t: t)

        def forward(case: Case, x: Tensor, w: Tensor, b: Tensor, after: Function = after) -> Tensor:
            return case.arranged(after(theirs.group_norm(x, case.groups, w, b, EPS)))

        def build(case: Case, activation: Any = activation) -> nn.GroupNorm:
            return nn.GroupNorm(case.groups, case.shape[1], EPS, activation=activation)

        def call(case: Case, x: Tensor, w: Tensor, b: Tensor, activation: Any = activation) -> Tensor:
            return functional.group_norm(x, case.groups, w, b, EPS, activation=activation)

        made += called(
            name=name,
            title="group_norm(x) * weight + bias" + (", and SiLU" if activation else ""),
            cases=(*IMAGES, *(f"{case}:channels_last" for case in IMAGES[:2])),
            tiny=(*TINY_IMAGES, "2x64x3x4:channels_last"),
            arguments=_image(2),
            makes={"GroupNorm": module(build, "weight", "bias"), "functional.group_norm": function(call)},
            forward=forward,
            roundings=4,
        )
    return made


WORKLOADS = (*ROW_NORMS, *_group_norms(), *_batch_norms())
