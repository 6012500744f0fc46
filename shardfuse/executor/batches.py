"""Launches that follow one another become one, where what they make is little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType

import torch

from .driver import Driver
from .steps import BEGIN, Address, Allocate, LaunchBatch, LaunchKernel, Over, Step
from .storage import LITTLE


def batch_launches(steps: Sequence[Step], made: Mapping[str, torch.Tensor], driver: Driver) -> list[Step]:
    """``steps`` with one for launches between which a program does no more than allocate, which it then does before.

    made: the layout of each tensor that kernels write.
    """
    out: list[Step] = []
    run: list[Step] = []
    for step in steps:
        if step == BEGIN or isinstance(step, Allocate | Over | Address) or _is_bare(step):
            run.append(step)
            continue
        out += [*_batched(run, made, driver), step]
        run = []
    return [*out, *_batched(run, made, driver)]


def _is_bare(step: Step) -> bool:
    """Is it the launch of a kernel and no more?

    One that is a Python function does more than that, and so does one of a kernel whose ranks exchange.
    """
    return isinstance(step, LaunchKernel) and not step.is_sending and isinstance(step.function, BuiltinFunctionType)


def _batched(run: Sequence[Step], made: Mapping[str, torch.Tensor], driver: Driver) -> Sequence[Step]:
    launches = [step for step in run if isinstance(step, LaunchKernel)]
    storage = [step for step in run if not isinstance(step, LaunchKernel)]
    names = [name for step in storage for name in step.defines if name in made]
    if len(launches) < 2 or sum(made[name].untyped_storage().nbytes() for name in names) > LITTLE:
        return run
    parts, arguments = tuple(one.name for one in launches), tuple(a for one in launches for a in one.arguments)
    batch = driver.batch(tuple(one.function for one in launches))
    return [*storage, LaunchBatch(f"batch_of_{parts[0]}", batch, arguments, launches=parts)]
