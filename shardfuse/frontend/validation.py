"""Comparison of a fusion's outputs with references, or with its own ops one by one in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch

from ..errors import DefinitionError, ValidationError
from ..executor.autocast import no_autocast
from ..executor.binding import Argument
from ..ir.fusion import Fusion
from .detection import has_dtensor
from .eager import evaluate_eager

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

fork_rng: Callable[[Sequence[torch.device]], AbstractContextManager[None]] = cast("Any", torch.random).fork_rng
_STEPS = 16
"""Units in the last place of the largest element that one may be off, times the root of an input's elements."""


def validated(
    fusion: Fusion,
    inputs: Sequence[Argument],
    run: Callable[[], list[torch.Tensor]],
    reference_outputs: Sequence[torch.Tensor] | None,
    device: torch.device | None = None,
) -> list[torch.Tensor]:
    """The outputs of ``run``, which come on ``device``; left out, where the inputs are.  Raises ``ValidationError``."""
    expected = None if reference_outputs is None else _checked_references(fusion, reference_outputs)
    if expected is None:
        unsharded = [_whole(x) if isinstance(x, torch.Tensor) else x for x in inputs]
        device = device or next(
            (x.device for x in inputs if isinstance(x, torch.Tensor) and x.ndim), torch.device("cpu")
        )
        # Random ops of the fusion draw what they drew for the reference.
        with fork_rng([device] if device.type == "cuda" else []), torch.no_grad(), no_autocast(device.type):
            expected = [x.clone() for x in evaluate_eager(fusion, unsharded, device)]
    outputs = run()
    found = [_whole(x) for x in outputs]
    if reference_outputs is not None:
        _check_shapes(found, expected)
    tolerances = val_tolerances(fusion, inputs)
    for k, (x, wanted) in enumerate(zip(found, expected, strict=True)):
        _compare(k, x, wanted, tolerances[k][1])
    return outputs


def _checked_references(fusion: Fusion, references: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The caller's own, before anything runs.  Raises ``DefinitionError`` where these are not as many as outputs."""
    returned = len([t for t in fusion.outputs if t not in fusion.aliases])
    if len(references) != returned:
        found = f"{len(references)} reference_outputs"
        raise DefinitionError("validate", found, f"{returned}, one for each output that execute returns")
    return [_whole(x) for x in references]


def _check_shapes(outputs: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> None:
    for k, (found, wanted) in enumerate(zip(outputs, references, strict=True)):
        if found.shape != wanted.shape:
            said = f"reference_outputs[{k}] of shape {list(wanted.shape)}"
            raise DefinitionError("validate", said, f"{list(found.shape)}, the shape of output {k}")


def _whole(x: torch.Tensor) -> torch.Tensor:
    """What a DTensor is a part of."""
    return cast("DTensor", x).full_tensor() if has_dtensor((x,)) else x


def val_tolerances(fusion: Fusion, inputs: Sequence[Argument]) -> list[tuple[float, float]]:
    """``(absolute, relative)`` for each output: the rounding of its dtype, growing with the elements of the inputs."""
    largest = max((x.numel() for x in inputs if isinstance(x, torch.Tensor)), default=1)
    outputs = [t for t in fusion.outputs if t not in fusion.aliases]
    found: list[tuple[float, float]] = []
    for t in outputs:
        if t.dtype.is_integral:
            found.append((0.0, 0.0))
            continue
        eps = torch.finfo(t.dtype.torch).eps
        tolerance = min(_STEPS * eps * max(largest, 1) ** 0.5, 0.1)
        found.append((tolerance, tolerance))
    return found


def _compare(k: int, found: torch.Tensor, wanted: torch.Tensor, relative: float) -> None:
    if found.shape != wanted.shape:
        raise ValidationError(f"output {k} of shape {list(found.shape)}", f"{list(wanted.shape)}")
    if not (found.dtype.is_floating_point or found.dtype.is_complex):
        if not torch.equal(found, wanted.to(found.dtype)):
            raise ValidationError(f"output {k}", "equal integers")
        return
    wide = torch.complex128 if found.dtype.is_complex else torch.float64
    a, b = found.to(wide), wanted.to(wide)
    finite = torch.isfinite(b)
    scale = b[finite].abs().max().item() if finite.any() else 0.0
    if not torch.allclose(a, b, rtol=relative, atol=relative * max(scale, 1e-30), equal_nan=True):
        worst = (a - b)[finite].abs().max().item() if finite.any() else float("nan")
        raise ValidationError(f"output {k}, off by {worst:.3g}", f"within {relative:.3g} of {scale:.3g}")
