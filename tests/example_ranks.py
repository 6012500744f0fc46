"""Ranks of the scripts of examples/ for test_examples.py, all forked from this process.

Arguments: a script's name, and "falsified" where what shardfuse gives it is to be wrong.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch._inductor.compile_fx  # what scripts import is imported once for all ranks
import torch.distributed.tensor.parallel
from forked_ranks import serve

import shardfuse.compile  # noqa: F401
from shardfuse.compat import nvfuser_direct
from shardfuse.nn import AddRMSNorm, GroupNorm

FOLDER = Path(__file__).parents[1] / "examples"
OFF = 1.001
"""The factor of a falsified result: 8000 roundings of float32."""


class Falsified(torch.nn.Module):
    """What `torch.compile` gives, where its result is off."""

    def __init__(self, model: torch.nn.Module, **options: object) -> None:
        super().__init__()
        self.model = model

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return self.model(*given) * OFF


def first_is_off(run: Callable[..., object]) -> Callable[..., object]:
    """``run``, whose result, or the first one of a list or tuple of them, is off."""

    def off(*given: object) -> object:
        match run(*given):
            case torch.Tensor() as result:
                return result * OFF
            case (first, *rest):
                return [first * OFF, *rest]

    return off


def falsify(name: str) -> None:
    match name:
        case "vision_transformer" | "decoder":
            torch.compile = Falsified
        case "unet_block":
            GroupNorm.forward = first_is_off(GroupNorm.forward)
        case "generate":
            AddRMSNorm.forward = first_is_off(AddRMSNorm.forward)
        case "nvfuser_mlp":
            nvfuser_direct.FusionDefinition.execute = first_is_off(nvfuser_direct.FusionDefinition.execute)
        case _:
            raise ValueError(name)


if __name__ == "__main__":
    arguments = serve()
    if arguments is not None:
        name, *how = arguments
        if how:
            falsify(name)
        sys.argv = [str(FOLDER / f"{name}.py")]
        runpy.run_path(sys.argv[0], run_name="__main__")
