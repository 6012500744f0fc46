"""nvFuser raises RuntimeError: shardfuse's errors as such, message for message."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from shardfuse.errors import ShardfuseError

P = ParamSpec("P")
R = TypeVar("R")


class NvFuserError(ShardfuseError, RuntimeError):
    """An error of shardfuse for programs that expect nvFuser's RuntimeError."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


def translated(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` with every ShardfuseError that is no built-in error raised as a RuntimeError."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except ShardfuseError as error:
            if isinstance(error, RuntimeError | NotImplementedError | AssertionError | AttributeError):
                raise
            raise NvFuserError(str(error)) from error

    return call
