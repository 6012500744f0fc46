# pyright: reportUnknownMemberType=false, reportPrivateImportUsage=false
"""What the pass did, told to torch's own logs: ``TORCH_LOGS="+shardfuse"`` and tlparse."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch._logging import trace_structured

from .ledger import RegionReport, Report

log = logging.getLogger("shardfuse.compile")


def publish(found: Sequence[RegionReport]) -> None:
    """One record in the log a graph, and one artifact beside those of the graph's compilation."""
    if not found:
        return
    text = str(Report(tuple(found)))
    log.info("%s", text)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "shardfuse_regions", "encoding": "string"},
        payload_fn=lambda: text,
    )
