# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
"""Memory through which the programs of one launch exchange words, kept from launch to launch."""

from __future__ import annotations

import torch

from .kept_tensors import made_to_last
from .launch import index_of


class Mailbox:
    """``words`` 64-bit words of one bound kernel, zeroed once for each stream that launches it.

    Launches of one stream follow one another; those of two streams may run at once and must not read each other's
    words.  A launch that is being captured into a graph gets words of its own, which the graph zeroes in each replay:
    a replay may meet any stream.
    """

    def __init__(self, words: int) -> None:
        self._words = words
        self._of_stream: dict[tuple[torch.device, int], torch.Tensor] = {}

    def on(self, device: torch.device, stream: int | None) -> torch.Tensor:
        """The words for a launch on the current stream of ``device``; stream: its handle, where that is known."""
        if device.type != "cuda":
            stream = 0
        elif torch._C._cuda_isCurrentStreamCapturing():  # a state of the stream, which any call may find changed
            return self._zeros(device)
        elif stream is None:
            stream = torch._C._cuda_getCurrentRawStream(index_of(device))
        found = self._of_stream.get((device, stream))
        if found is None:
            found = self._of_stream[device, stream] = made_to_last(lambda: self._zeros(device), device)
        return found

    def _zeros(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(self._words, dtype=torch.int64, device=device)
