"""Launches that follow one another become one, where what they make is little."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType
from typing import cast

import torch

from .driver import Driver
from .storage import LITTLE

_LAUNCH = re.compile(r"(kernel_\w+)\(stream, (.*)\)")
_STORAGE = re.compile(r"\w+ = (empty\(|base \+|\w+_at \+|\w+\.data_ptr\(\)|over\(|\w+ if own_|begin\(|workspace\.)")


def batch_launches(
    lines: Sequence[str],
    made: Mapping[str, torch.Tensor],
    names: dict[str, object],
    driver: Driver,
    batches: dict[str, tuple[str, ...]],
) -> list[str]:
    """``lines`` of a program with one line for launches between which it does no more than allocate, which it then
    does before them.  The batch is put in ``names``, and what it consists of in ``batches``.

    made: the layout of each tensor that kernels write.
    """
    out: list[str] = []
    run: list[str] = []
    for line in [*lines, ""]:
        found = _LAUNCH.fullmatch(line)
        # a launch that is a Python function does more than launch
        is_launch = found is not None and isinstance(names[found[1]], BuiltinFunctionType)
        if is_launch or _STORAGE.match(line):
            run.append(line)
            continue
        out += [*_batched(run, made, names, driver, batches), line]
        run = []
    return out[:-1]


def _batched(
    run: Sequence[str],
    made: Mapping[str, torch.Tensor],
    names: dict[str, object],
    driver: Driver,
    batches: dict[str, tuple[str, ...]],
) -> list[str]:
    launches = [found for line in run if (found := _LAUNCH.fullmatch(line)) is not None]
    storage = [line for line in run if _LAUNCH.fullmatch(line) is None]
    size = sum(made[name].untyped_storage().nbytes() for line in storage if (name := line.split(" = ")[0]) in made)
    if len(launches) < 2 or size > LITTLE:
        return list(run)
    name = f"batch_of_{launches[0][1]}"
    batches[name] = tuple(found[1] for found in launches)
    names[name] = driver.batch(tuple(cast(Callable[..., None], names[part]) for part in batches[name]))
    return [*storage, f"{name}({', '.join(['stream', *(found[2] for found in launches)])})"]
