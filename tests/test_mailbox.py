"""Where an exchange buffer comes from; what a GPU makes of it is in `gpu/test_compile_gpu.py`."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

from shardfuse.executor.mailbox import Mailbox

GPU = torch.device("cuda", 0)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A thread's current stream, and whether that is being captured."""
    current: dict[str, object] = {"MainThread": 7, "capturing": False}

    @contextmanager
    def on(stream: object):
        name = threading.current_thread().name
        current[name] = stream
        yield
        del current[name]

    here = lambda device: current[threading.current_thread().name]  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", here)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", here, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: current["capturing"], raising=False)
    return current


def test_what_is_kept_is_made_by_a_thread_that_allocates_from_no_pool(
    streams: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA graph trees have the memory of a thread's first run back when it ends; a graph's own is its own."""
    made: list[tuple[str, object]] = []

    def zeros(self: Mailbox, device: torch.device) -> torch.Tensor:
        name = threading.current_thread().name
        made.append((name, streams[name]))
        return torch.zeros(2, dtype=torch.int64)

    monkeypatch.setattr(Mailbox, "_zeros", zeros)
    mailbox = Mailbox(2)
    first = mailbox.on(GPU, None)
    assert mailbox.on(GPU, None) is first
    assert mailbox.on(GPU, 7) is first, "by the handle that the program has asked for"
    streams["MainThread"] = 8
    assert mailbox.on(GPU, 8) is not first
    assert mailbox.on(GPU, None) is mailbox.on(GPU, 8)
    streams["capturing"] = True
    assert mailbox.on(GPU, 8) is not mailbox.on(GPU, None)
    assert made == [("shardfuse-allocation", 7), ("shardfuse-allocation", 8), ("MainThread", 8), ("MainThread", 8)]


def test_an_error_of_that_thread_is_the_callers(streams: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(self: Mailbox, device: torch.device) -> torch.Tensor:
        raise torch.OutOfMemoryError("none is left")

    monkeypatch.setattr(Mailbox, "_zeros", zeros)
    with pytest.raises(torch.OutOfMemoryError, match="none is left"):
        Mailbox(2).on(GPU, None)
