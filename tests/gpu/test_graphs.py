"""Launches that are one graph: other pointers and numbers in each call, streams, threads, captures."""

from __future__ import annotations

import threading

import pytest
import torch

from benchmarks.roundings import assert_near
from shardfuse import DataType, FusionDefinition

pytestmark = pytest.mark.gpu

SEGMENTS = 4


def sums() -> FusionDefinition:
    """Sums over rows, times a number, of tensors that have nothing to do with each other."""
    with FusionDefinition() as fd:
        scale = fd.define_scalar(dtype=DataType.Double)
        for _ in range(SEGMENTS):
            x = fd.define_tensor([-1, 512], contiguity=True)
            fd.add_output(fd.ops.mul(fd.ops.sum(x, [-1]), scale))
    return fd


def arguments(seed: int, scale: float) -> list[torch.Tensor | float]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [scale, *(torch.randn(32, 512, device="cuda", generator=generator) for _ in range(SEGMENTS))]


def check(found: list[torch.Tensor], given: list[torch.Tensor | float]) -> None:
    for out, x in zip(found, given[1:], strict=True):
        assert isinstance(x, torch.Tensor)
        x, scale = x.double(), given[0]
        # a sum times 0 is a zero of the sum's sign, where a sum of products with 0 is +0
        assert_near(out, x.sum(-1) * scale, terms=x.abs().sum(-1) * scale)


def test_calls_in_flight_keep_their_arguments() -> None:
    fd = sums()
    given = [arguments(k, k + 0.5) for k in range(40)]
    found = [fd.execute(one) for one in given]
    program = fd.fec.last_program
    assert program is not None
    assert program.text.count("batch_of_") == 1
    assert program.text.count("kernel_") == 1, "no launch stands alone"
    for out, one in zip(found, given, strict=True):
        check(out, one)
    again = [fd.execute(one) for one in given]
    assert all(torch.equal(a, b) for x, y in zip(found, again, strict=True) for a, b in zip(x, y, strict=True))


def test_a_misaligned_tensor_among_them() -> None:
    fd, given = sums(), arguments(0, 2.0)
    check(fd.execute(given), given)
    given[2] = torch.randn(32 * 512 + 1, device="cuda")[1:].view(32, 512)
    check(fd.execute(given), given)


def test_captured() -> None:
    fd, given = sums(), arguments(0, 2.0)
    fd.execute(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fd.execute(given)
    for x in given[1:]:
        assert isinstance(x, torch.Tensor)
        x.normal_()
    other = arguments(1, 3.0)
    check(fd.execute(other), other)  # does not change what was captured
    graph.replay()
    check(found, given)


def test_threads_and_streams() -> None:
    fd, wrong = sums(), list[BaseException]()
    fd.execute(arguments(0, 1.0))

    def run(first: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for seed in range(first, first + 50):
                    given = arguments(seed, seed / 7)
                    check(fd.execute(given), given)
        except BaseException as error:  # noqa: BLE001 - raised below
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(1000 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


@pytest.mark.multi_gpu
def test_a_thread_with_another_current_gpu() -> None:
    """A new thread's is the first one, wherever its tensors are."""
    x, errors = torch.randn(32, 512, device="cuda:1"), list[BaseException]()
    with FusionDefinition() as fd:
        t = fd.define_tensor([-1, 512], contiguity=True)
        fd.add_output(fd.ops.mul(t, fd.ops.sum(t, [-1], keepdim=True)))

    def run() -> None:
        try:
            for _ in range(3):
                (y,) = fd.execute([x])
                total = x.double().sum(-1, keepdim=True)
                assert_near(y, x.double() * total, terms=x.abs() * x.abs().sum(-1, keepdim=True))
                assert y.device == x.device
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    for _ in range(2):  # the second one finds all compiled
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert not errors, errors[0]
