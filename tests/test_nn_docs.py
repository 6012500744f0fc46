"""docs/nn.md: its Python blocks run, and its table names what shardfuse.nn has."""

from __future__ import annotations

import re
from pathlib import Path

import shardfuse
from shardfuse import nn

PAGE = (Path(__file__).parents[1] / "docs/nn.md").read_text()
BLOCK = re.compile(r"(?:<!-- on (\d+) ranks -->\n)?```python\n(.*?)```", re.DOTALL)


def test_the_blocks_run() -> None:
    names: dict[str, object] = {}
    blocks = BLOCK.findall(PAGE)
    assert len(blocks) == PAGE.count("```python") == 4
    for ranks, code in blocks:
        if ranks:
            shardfuse.simulate(lambda code=code: exec(code, {}), int(ranks), timeout=120)
        else:
            exec(code, names)


def test_everything_is_named() -> None:
    for name in {*nn.__all__} - {"FusionTimer", "Conversion", "Redistribution"}:
        assert f"`{name}`" in PAGE or f"`shardfuse.nn.{name}`" in PAGE, name
    functions = {
        name
        for name, value in vars(nn.functional).items()
        if getattr(value, "__module__", "") == nn.functional.__name__
    }
    for name in sorted(n for n in functions if n.islower() and not n.startswith("_")):
        assert f"`{name}`" in PAGE, name
