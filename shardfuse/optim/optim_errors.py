"""Errors of ``shardfuse.optim``.  The constructor takes values; the class holds the sentence."""

from __future__ import annotations

from ..base_error import ShardfuseError, shown


class OptimizerTensorError(ShardfuseError):
    """A parameter, a gradient or a state that an optimiser step cannot work on."""

    def __init__(self, call: str, tensor: str, found: str, expected: str, advice: str) -> None:
        super().__init__(f"{call}: {tensor} {found}, expected {expected}: {advice}")

    @classmethod
    def of_repeated_elements(cls, call: str, tensor: str) -> OptimizerTensorError:
        """A tensor that is to be written holds several elements in one place of memory."""
        found, expected = "has several elements in one place, as expand() makes them", "a place for each, to write to"
        return cls(call, tensor, found, expected, "nothing was written; clone() it")

    @classmethod
    def of_repeated_tensor(cls, call: str, tensor: str) -> OptimizerTensorError:
        """A tensor that is to be written is listed more than once."""
        return cls(call, tensor, "is listed twice", "each parameter once", "nothing was written; list it once")


class OptimizerArgumentError(ShardfuseError, ValueError):
    """An argument of an optimiser, or of a function on gradients, is out of range."""

    def __init__(self, call: str, argument: str, found: object, expected: str) -> None:
        super().__init__(f"{call}: {argument} is {shown(found)}, expected {expected}")


class NonFiniteNormError(ShardfuseError, RuntimeError):
    """The norm of all gradients is infinite or NaN, and the caller wanted to be told."""

    def __init__(self, call: str, exponent: float, found: float) -> None:
        super().__init__(
            f"{call}: the total norm of order {exponent:g} of the gradients is {found}, expected a finite number: "
            "nothing was changed; skip this step, or leave error_if_nonfinite out to go on with it"
        )
