"""A caller's module tried on random numbers: does it compute what would take its place, forward and backward?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch

Module = torch.nn.Module
Wanted = Callable[[Module, torch.Tensor], torch.Tensor]
"""What a module should give for an input, by torch's own functions of the parameters that it has."""


@dataclass(frozen=True)
class Case:
    """An input of random numbers: its dims before the features, their size, and the dtype of it and of parameters.

    ``has_nan``: its last number is NaN, which a module may replace or spread.
    """

    rows: tuple[int, ...]
    magnitude: float = 1.0
    dtype: torch.dtype = torch.float32
    has_nan: bool = False

    def __str__(self) -> str:
        kind, dims = str(self.dtype).removeprefix("torch."), len(self.rows) + 1
        return f"{kind} numbers of size {self.magnitude:g}{' and a NaN' if self.has_nan else ''} in {dims} dims"

    def draw(self, features: int, generator: torch.Generator) -> torch.Tensor:
        """The input: ``[*rows, features]``."""
        x = torch.randn(*self.rows, features, generator=generator, dtype=torch.float32) * self.magnitude
        if self.has_nan:
            x.view(-1)[-1] = torch.nan
        return x.to(self.dtype)


@contextmanager
def apart() -> Generator[None]:
    """With gradients, on the CPU, in the types of the tensors, whatever the caller has set; and without a trace in the
    state of torch's generator."""
    fork = cast("Any", torch.random).fork_rng
    with (
        fork(devices=[]),
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def why_other(module: Module, wanted: Wanted, features: int, cases: Sequence[Case], std: float) -> str | None:
    """How a copy of ``module`` is found to differ from ``wanted``, with parameters of deviation ``std``; else None.

    Each case runs in training and in evaluation, twice, as what is random differs from one run to the next.
    Compared are the result, its dtype and, in float32, the gradients of the input and of vectors among the parameters.
    """
    with apart():
        trial = copy.deepcopy(module).to_empty(device="cpu").float()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in trial.parameters():
                p.normal_(std=std, generator=generator)
        for case in cases:
            here = trial if case.dtype == torch.float32 else copy.deepcopy(trial).to(case.dtype)
            x = case.draw(features, generator)
            for mode in (True, False):
                reason = _differs(here.train(mode), wanted, x)
                if reason is not None:
                    return f"{reason} of {case}, in {'training' if mode else 'evaluation'}"
    return None


def likeness(module: Module) -> Hashable:
    """What two modules have in common that a trial cannot tell apart, while both live: equal where they are of one
    class, with tensors of the same shapes and types, the same numbers and texts as attributes, and the same objects."""
    usual = vars(Module())
    own = [
        (name, value if _is_plain(value) else id(value)) for name, value in vars(module).items() if name not in usual
    ]
    tensors: Any = (*module._parameters.items(), *module._buffers.items())  # pyright: ignore[reportPrivateUsage]
    kinds = [(name, None if t is None else (tuple(t.shape), t.dtype)) for name, t in tensors]
    children = [(name, likeness(child)) for name, child in module.named_children()]
    return type(module), tuple(own), tuple(kinds), tuple(children)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _differs(module: Module, wanted: Wanted, given: torch.Tensor) -> str | None:
    vectors = [p.requires_grad_() for p in module.parameters() if p.ndim == 1]
    x = given.clone().requires_grad_()
    expected = wanted(module, x)
    kept, got = x.detach().clone(), expected
    for _ in range(2):
        made: object = module(x)
        if not isinstance(made, torch.Tensor) or made.dtype != x.dtype:
            return f"it gives {made.dtype if isinstance(made, torch.Tensor) else type(made).__name__}"
        got = made
        if not is_close(got, expected, 1e-4 if x.dtype == torch.float32 else 4 * torch.finfo(x.dtype).eps):
            return "it gives another result"
        if not torch.equal(kept.view(torch.uint8), x.detach().view(torch.uint8)):  # NaN is not equal to itself
            return "it changes its input"
    if x.dtype != torch.float32 or bool(kept.isnan().any()):
        return None  # each rounds on the way as it does, and gradients of a NaN are anything
    factor = torch.linspace(-1.0, 1.0, expected.numel(), device=expected.device).sin().view_as(expected)
    grad: Any = torch.autograd.grad  # of a weight that the result does not depend on it is None
    found, gradients = (grad(result, (x, *vectors), factor, allow_unused=True) for result in (got, expected))
    pairs = zip(found, gradients, strict=True)
    return None if all(a is not None and is_close(a, b) for a, b in pairs) else "it gives another gradient"


def is_close(got: torch.Tensor, wanted: torch.Tensor, off: float = 1e-4) -> bool:
    """Is each element what is wanted by the fraction ``off``, or by a tenth of that of the largest, at most?

    Where a NaN is wanted, a NaN is close.
    """
    largest = float(wanted.detach().nan_to_num().abs().max()) if wanted.numel() else 0.0
    return got.shape == wanted.shape and torch.allclose(got, wanted, off, off / 10 * largest, equal_nan=True)
