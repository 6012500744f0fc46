"""Launches of what Triton has compiled: found by no less than what Triton tells the compiler of the arguments."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from shardfuse.nn.triton_launch import Launches, _kind, _known

NUMBERS = (0, 1, 2, 15, 16, 17, 48, -1, -16, (1 << 31) - 1, 1 << 31, 1 << 36, -(1 << 31), -(1 << 31) - 1, 0.0, 0.1, 1.0)


def told(argument: object) -> tuple[object, object]:
    """The type and what the compiler is told of the value, by Triton."""
    triton = pytest.importorskip("triton._C.libtriton")
    backend = pytest.importorskip("triton.backends.nvidia.compiler").CUDABackend
    return triton.native_specialize_impl(backend, argument, False, True, True)


def test_numbers_that_are_alike_are_so_for_triton() -> None:
    numbers = [*NUMBERS, *(random.randrange(1 << 40) for _ in range(200))]
    for x in numbers:
        assert all(told(x) == told(y) for y in numbers if _known(x) == _known(y)), x


def test_tensors_that_are_alike_are_so_for_triton() -> None:
    whole = [torch.zeros(64, dtype=d) for d in (torch.float32, torch.bfloat16, torch.int64, torch.int32)]
    tensors = [t[k:] for t in whole for k in range(9)]
    for x in tensors:
        assert all(told(x) == told(y) for y in tensors if _kind(x) == _kind(y))


class Function:
    """In place of Triton's: ``own`` has what was compiled, ``again`` what that was launched with."""

    arg_names = ("x_ptr", "size", "share", "SIZE")

    def __init__(self) -> None:
        self.own: list[Any] = []
        self.again: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **constants: Any) -> Any:
            self.own.append((grid, arguments, constants))
            number = len(self.own)

            class Compiled:
                def __getitem__(_, grid: tuple[int, ...]) -> Any:  # noqa: N805
                    return lambda *given: self.again.append((number, grid, given))

            return Compiled()

        return run


def test_what_was_compiled_for_such_arguments_is_launched() -> None:
    function, x = Function(), torch.zeros(64)
    launch = Launches(function)
    options = {"SIZE": 8, "num_warps": 4}
    launch((3,), [x], (32, 0.5), options)
    assert function.own == [((3,), (x, 32, 0.5), options)]
    launch((2, 5), [x], (48, 0.25), options)
    assert function.again == [(1, (2, 5, 1), (x, 48, 0.25, 8))]
    for other in ([x[1:]], [x.int()]):
        launch((2,), other, (48, 0.25), options)
    launch((2,), [x], (49, 0.25), options)
    launch((2,), [x], (1, 0.25), options)
    launch((2,), [x], (48, 0.25), {"SIZE": 16, "num_warps": 4})
    launch((2,), [x], (48, 0.25), {"SIZE": 8, "num_warps": 8})
    assert len(function.own) == 7
    launch((2,), [x], (48, 0.25), {"SIZE": 16, "num_warps": 4})
    assert function.again[1:] == [(6, (2, 1, 1), (x, 48, 0.25, 16))]


def test_an_interpreted_function_is_called_each_time() -> None:
    calls: list[tuple[object, ...]] = []

    class Interpreted:
        arg_names = ("x_ptr",)

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **_: calls.append(arguments)

    launch, x = Launches(Interpreted()), torch.zeros(4)
    for _ in range(2):
        launch((1,), [x], (), {})
    assert len(calls) == 2
