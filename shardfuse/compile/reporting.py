# pyright: reportUnknownMemberType=false
"""``shardfuse.compile.report``: what was noted, measured and drawn where that is asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from ..errors import ArgumentError
from .ledger import RegionReport, Report
from .ledger import report as noted
from .region_page import write_page
from .region_times import measured, sizes_of


def report(*, clear: bool = False, measure: bool = False, html: str | Path | None = None) -> Report:
    """Every region that the pass has looked at in this process, in order.

    clear: forget them afterwards.
    measure: run each of the last 256 regions alone on the current GPU, as shardfuse's kernels and as those that
    Inductor makes of it, which takes a compilation; without a GPU nothing is measured.
    html: a file to write the same to, as one page that needs no network.

    Raises ``ArgumentError`` for what is no path or no flag, ``PageError`` where the page cannot be written; nothing is
    forgotten then.
    """
    if not isinstance(cast(object, html), str | Path | None):
        raise ArgumentError("report", "html", html, "a string or a Path")
    for name, flag in (("clear", clear), ("measure", measure)):
        if not isinstance(cast(object, flag), bool):
            raise ArgumentError("report", name, flag, "True or False")
    found = noted()
    found = _measured(found) if measure and torch.cuda.is_available() else found
    if html is not None:
        write_page(html, found)
    if clear:
        noted(clear=True)
    return found


def _measured(found: Report) -> Report:
    """Regions alike are measured once: of one program, whose sizes may be symbols, at the same sizes."""
    device = torch.device("cuda", torch.cuda.current_device())
    taken: dict[tuple[object, ...], tuple[float, float]] = {}
    regions: list[RegionReport] = []
    for r in found.regions:
        key = (r.program, None if r.alone is None else sizes_of(r.alone))
        if r.alone is not None and key not in taken:
            taken[key] = measured(r.alone, r.program, device)
        own, inductor = taken.get(key, (None, None))
        regions.append(replace(r, measured_us=own, measured_inductor_us=inductor))
    return Report(tuple(regions))
