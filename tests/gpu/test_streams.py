"""A collective on the communication stream sees what kernels made before it, and what reads it waits for it."""

from __future__ import annotations

import pytest
import torch

from shardfuse.executor.streams import start_and_wait

pytestmark = pytest.mark.gpu

LONG = 200_000_000
"""Cycles of the GPU's clock, a tenth of a second: whoever does not wait comes first."""
COUNT = 1 << 20


def test_a_collective_waits_for_what_it_reads() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    start, wait = start_and_wait(device)
    x, out = torch.ones(COUNT, device=device), torch.zeros(COUNT, device=device)

    def collective(t: torch.Tensor) -> torch.Tensor:
        return torch.mul(t, 2.0, out=out)

    # A kernel's first launch loads it, and a first allocation of a stream asks the driver for memory: either may wait
    # until the GPU is idle, which hides that nobody waited.
    _, done = start(collective, x)
    wait(done, x, out)
    x.zero_()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    x.fill_(1.0)
    out.fill_(0.0)
    _, done = start(collective, x)
    wait(done, x, out)
    assert (out == 2.0).all()


def test_what_reads_a_result_waits_for_it() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    start, wait = start_and_wait(device)
    target = torch.zeros(COUNT, device=device)
    read = torch.empty_like(target)
    target.fill_(1.0)  # loads the kernels: see above
    read.copy_(target)
    torch.cuda.synchronize()

    def collective(t: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(LONG)
        return t.fill_(3.0)

    out, done = start(collective, target)
    wait(done, out)
    read.copy_(target)
    assert (read == 3.0).all()


@pytest.mark.alone  # of two programs' kernels the GPU may run one after the other, and the sleep is over
def test_a_collective_runs_beside_kernels() -> None:
    """It is what streams are for: kernels that do not read it go on while it waits."""
    device = torch.device("cuda", torch.cuda.current_device())
    start, wait = start_and_wait(device)
    target, other = torch.zeros(COUNT, device=device), torch.zeros(COUNT, device=device)
    target.fill_(3.0)  # a kernel's first launch loads it, for which CUDA may wait until the GPU is idle
    other.add_(0.0)
    torch.cuda.synchronize()
    ended = torch.cuda.Event()

    def collective(t: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(10 * LONG)
        return t.fill_(3.0)

    out, done = start(collective, target)
    other.add_(1.0)
    ended.record()
    ended.synchronize()
    assert not done.query()
    wait(done, out)
    assert (out == 3.0).all()
