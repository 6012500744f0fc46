"""docs/modules.md: its tables name what shardfuse.nn has."""

from __future__ import annotations

from pathlib import Path

from shardfuse import nn

PAGE = (Path(__file__).parents[1] / "docs/modules.md").read_text()


def test_everything_is_named() -> None:
    for name in {*nn.__all__} - {"FusionTimer", "Conversion", "Redistribution"}:
        assert f"`{name}`" in PAGE or f"`shardfuse.nn.{name}`" in PAGE, name
    functions = {
        name
        for name, value in vars(nn.functional).items()
        if getattr(value, "__module__", "") in (nn.functional.__name__, nn.functional_losses.__name__)
    }
    for name in sorted(n for n in functions if n.islower() and not n.startswith("_")):
        assert f"`{name}`" in PAGE, name
