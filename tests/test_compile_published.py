"""What tlparse finds of a compilation: an artifact beside those of each graph, in the words of the report."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import torch
from torch._logging._internal import TorchLogsFormatter

from shardfuse.compile import report

F = torch.nn.functional
ALL = {"shardfuse.take": "all", "force_disable_caches": True}


class Trace(logging.Handler):
    """What torch writes into a folder where TORCH_TRACE names one."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(TorchLogsFormatter(trace=True))
        self.text: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.text.append(self.format(record))

    def artifacts(self, name: str) -> list[tuple[dict[str, object], str]]:
        """What a record says of an artifact, and the artifact, as tlparse reads them."""
        found: list[tuple[dict[str, object], str]] = []
        for text in self.text:
            first, *lines = text.split("\n\t")
            said = json.loads(first[first.index("{") :])
            if said.get("artifact", {}).get("name") == name:
                found.append((said, "\n".join(lines)))
        return found


@pytest.fixture
def trace() -> Iterator[Trace]:
    torch._dynamo.reset()
    report(clear=True)
    handler, log = Trace(), logging.getLogger("torch.__trace")
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)
    report(clear=True)


def test_each_graph_with_regions_has_an_artifact(trace: Trace) -> None:
    x = torch.randn(8, 16, requires_grad=True)
    torch.compile(lambda x: F.layer_norm(x, (16,)).softmax(-1), backend="shardfuse", options=ALL)(x).sum().backward()
    found = trace.artifacts("shardfuse_regions")
    regions = report().regions
    assert [r.graph for r in regions] == ["forward", "backward"]
    assert len(found) == 2
    for (said, payload), region in zip(found, regions, strict=True):
        assert said["artifact"] == {"name": "shardfuse_regions", "encoding": "string"}
        assert payload == f"1 regions, 1 taken\n{region}"
        assert "test_compile_published.py" in payload, "the caller's lines"
    frames = {(said["frame_id"], said["frame_compile_id"]) for said, _ in found}
    assert len(frames) == 1, "of one frame, in whose list tlparse shows both"


def test_regions_that_are_left_are_in_it_with_the_reason(trace: Trace) -> None:
    torch.compile(lambda x: x.softmax(-1), backend="shardfuse")(torch.randn(8, 16))
    ((_, payload),) = trace.artifacts("shardfuse_regions")
    assert payload.startswith("1 regions, 0 taken\n")
    assert "left to Inductor: there is nothing to gain on a CPU" in payload


def test_a_graph_without_regions_has_none(trace: Trace) -> None:
    torch.compile(lambda x: x + 1, backend="shardfuse", options=ALL)(torch.randn(8, 16))
    assert trace.text
    assert not trace.artifacts("shardfuse_regions")
