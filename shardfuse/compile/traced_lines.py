"""The lines of the caller's program that nodes of a graph come from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import cast

import torch
from torch.fx import Node

_TORCH = f'File "{Path(torch.__file__).parent}/'


def lines_of(nodes: Iterable[Node]) -> tuple[str, ...]:
    """The caller's lines, ``file:line: text``, that the nodes come from, each once.

    Of each node the innermost frame outside of torch; where all are torch's, as of a layer of ``nn.Sequential``, the
    innermost.
    """
    found: dict[str, None] = {}
    for n in nodes:
        trace = cast("str | None", n.meta.get("stack_trace"))
        frames = [line.strip() for line in (trace or "").splitlines() if line.strip()]
        places = [k for k, line in enumerate(frames) if line.startswith('File "')]
        if not places:
            continue
        last = next((k for k in reversed(places) if not frames[k].startswith(_TORCH)), places[-1])
        file, line = frames[last].split(", ")[:2]
        text = frames[last + 1] if last + 1 < len(frames) else ""
        name = file.removeprefix('File "').rstrip('"').rsplit("/", 1)[-1]
        found[f"{name}:{line.removeprefix('line ')}: {text}"] = None
    return tuple(found)
