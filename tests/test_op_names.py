"""A bad call of an op is told of under the name by which the op was called, whatever it is made of."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from shardfuse import DataType, FusionDefinition, ShardfuseError
from shardfuse.ops.build import ALIASES, Ops

ARGUMENTS = ("x", "complex", "int8", 300, 1j, [12], [0, 0], 7, "a text", None)
"""Three inputs by their names, and what few ops take."""


def test_every_op_is_told_of_by_its_own_name() -> None:
    with FusionDefinition() as fd:
        inputs = {
            "x": fd.define_tensor([-1, 4]),
            "complex": fd.define_tensor([3, 4], dtype=DataType.ComplexFloat),
            "int8": fd.define_tensor([3, 4], dtype=DataType.Int8),
        }
        names = [name for name in dir(fd.ops) if not name.startswith("_")]
        assert set(names) > set(ALIASES)
        assert set(names) > {name for name in vars(Ops) if not name.startswith("_")}
        refused: list[tuple[str, str]] = []
        for name, count in itertools.product(names, range(1, 4)):
            for given in itertools.product(ARGUMENTS, repeat=count):
                arguments = [inputs.get(v, v) if isinstance(v, str) else v for v in given]
                try:
                    getattr(fd.ops, name)(*arguments)
                except ShardfuseError as error:
                    refused.append((name, str(error)))
                except TypeError:  # too few arguments, or too many: Python's own
                    continue
    assert len({name for name, _ in refused}) > 100, "nearly every op refuses some of these"
    assert [told for told in refused if re.match(rf"ops\.{told[0]}\b", told[1]) is None] == []


def test_clip_is_clamp() -> None:
    with FusionDefinition() as fd:
        x, small = fd.define_tensor([3]), fd.define_tensor([3], dtype=DataType.Int8)
        fd.add_output(fd.ops.clip(x, 0.0, max=1.0))
        with pytest.raises(ShardfuseError, match=r"^ops\.clip: max is 300, expected"):
            fd.ops.clip(small, None, 300)
    assert fd.execute([torch.tensor([-1.0, 0.5, 2.0]), torch.zeros(3, dtype=torch.int8)])[0].tolist() == [0.0, 0.5, 1.0]
