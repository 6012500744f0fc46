"""The base of every error that shardfuse raises about the caller's program; `errors.py` has the errors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh


class Words(str):
    """What was found, in words: it is shown without the quotation marks of a caller's string."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def shown(value: object) -> str:
    """``value`` in a sentence: its kind where writing it out would be long, or read a tensor from a GPU."""
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} of shape {list(value.shape)}"
    text = repr(value)
    if isinstance(value, TorchDeviceMesh):  # shardfuse's has the same name
        return f"torch's {text}"
    return text if len(text) <= 100 and "\n" not in text else f"a {type(value).__name__}, {text[:60]!r}..."


class ShardfuseError(Exception):
    """Base of every error that shardfuse raises about the caller's program."""

    is_about_schedule = False
    """May a tensor's mesh, splits or storage be what is wrong?  Then the lines that said them are named as well."""
    _sentence = ""
    _lines: tuple[str, ...] = ()

    def __init__(self, *args: object) -> None:
        self.args = args

    def at(self, lines: Iterable[str]) -> None:
        """Name lines of the caller's program below the sentence, each once: ``train.py:31: y = fd.ops.add(a, b)``."""
        if not self._lines:
            self._sentence = str(self)
        self._lines = tuple(dict.fromkeys((*self._lines, *lines)))
        sentence, *rest = self._sentence.split("\n")
        self.args = ("\n".join((sentence, *(f"  at {line}" for line in self._lines), *rest)),)


class ArgumentError(ShardfuseError):
    """An argument of a function is of a kind that it does not take."""

    def __init__(self, function: str, argument: str, found: object, expected: str) -> None:
        super().__init__(f"{function}: {argument} is {shown(found)}, expected {expected}")
