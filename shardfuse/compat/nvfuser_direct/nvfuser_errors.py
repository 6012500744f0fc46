"""nvFuser raises RuntimeError: shardfuse's errors as such, message for message."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from shardfuse.errors import ShardfuseError, UnknownOpError

P = ParamSpec("P")
R = TypeVar("R")


class NvFuserError(ShardfuseError, RuntimeError):
    """An error of shardfuse for programs that expect nvFuser's RuntimeError."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class NvFuserUnknownOpError(NvFuserError, UnknownOpError):
    """``fd.ops`` has no op of that name: an AttributeError too, so that ``hasattr`` tells."""

    def __init__(self, message: str) -> None:
        ShardfuseError.__init__(self, message)


def translated(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` with every ShardfuseError that is no AssertionError raised as a RuntimeError."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except ShardfuseError as error:
            if isinstance(error, RuntimeError | AssertionError):
                raise
            if isinstance(error, UnknownOpError):
                raise NvFuserUnknownOpError(str(error)) from error
            raise NvFuserError(str(error)) from error

    return call
