"""Errors of the modules of shardfuse.nn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from .base_error import ShardfuseError, shown


class PlacementError(ShardfuseError):
    """A placement (DTensor's Shard, Replicate, Partial) does not fit the mesh, the tensor or the module."""

    def __init__(self, argument: str, placements: Sequence[object], against: str, advice: str) -> None:
        found = ", ".join(str(p) if isinstance(p, str) or hasattr(p, "is_shard") else shown(p) for p in placements)
        super().__init__(f"{argument}={found} does not fit {against}: {advice}")


class NamingError(ShardfuseError):
    """An error whose sentence begins with the module or function that was called, and an argument of it."""

    module: str
    argument: str
    _form: ClassVar[str]
    """How the sentence begins."""

    def rename(self, called: str, argument: str) -> None:
        """Name what the caller has called, and the argument as that has it, where it is made of a module."""
        sentence, lines = self._sentence if self._lines else str(self), self._lines
        rest = sentence.removeprefix(self._form.format(self.module, self.argument))
        self.module, self.argument = called, argument
        self.args, self._lines = (f"{self._form.format(called, argument)}{rest}",), ()
        self.at(lines)


class ModuleInputError(NamingError):
    """A tensor handed to a module of shardfuse.nn does not fit the module, or is none."""

    _form = "{}: {} has "

    def __init__(self, module: str, argument: str, found: str, expected: str, advice: str) -> None:
        self.module, self.argument = module, argument
        super().__init__(f"{module}: {argument} has {found}, expected {expected}: {advice}")

    @classmethod
    def of_type(cls, module: str, argument: str, found: object, expected: str) -> ModuleInputError:
        """For what is no tensor, or not of the type that an argument is of."""
        kind = type(found)
        named = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
        is_of_fx = named == "torch.fx.proxy.Proxy"
        leaf = "have is_leaf_module of a torch.fx.Tracer say so of this module, or take torch.export.export"
        return cls(module, argument, f"type {named}", expected, leaf if is_of_fx else "pass one")


class ModuleArgumentError(NamingError):
    """A constructor argument of a module of shardfuse.nn is out of range."""

    _form = "{}({}="

    def __init__(self, module: str, argument: str, found: object, expected: str) -> None:
        self.module, self.argument = module, argument
        super().__init__(f"{module}({argument}={shown(found)}): expected {expected}")


class CompiledElsewhereError(ShardfuseError):
    """A compiled graph holds the settings of a sharded module as another rank has it."""

    def __init__(self, op: str, rank: int, here: int) -> None:
        super().__init__(f"shardfuse::{op} was compiled for rank {rank} and called on rank {here}: compile it there")


class SecondDerivativeError(ShardfuseError):
    """The gradient of a module of shardfuse.nn is differentiated once more."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} has no second derivative: call torch's module where create_graph=True")


class TransformError(ShardfuseError):
    """A module of shardfuse.nn, or its gradient, is batched or transformed by torch.func, vmap or is_grads_batched."""

    def __init__(self, inside: str) -> None:
        super().__init__(
            f"a module of shardfuse.nn does not run inside of {inside}: call torch's module there, or ask for one "
            "gradient at a time by torch.autograd.grad"
        )


class ChangedBeforeBackwardError(ShardfuseError, RuntimeError):
    """A tensor was written between a forward and the backward that reads it; torch's own ops say it so."""

    def __init__(self, shape: tuple[int, ...], dtype: object, found: int, expected: int) -> None:
        super().__init__(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {list(shape)} and {dtype} is at version {found}; expected version {expected} "
            "instead: run the backward before the optimiser's step, or what else writes the tensor"
        )


class ModuleChangedError(ShardfuseError):
    """torch has made another module of one that ``convert`` has put in a model."""

    def __init__(self, name: str, made: str, found: str) -> None:
        super().__init__(
            f"Conversion.undo: {name or 'the model'} is a {found}, where convert made a {made}: undo before "
            "fully_shard, a parametrization, pruning or weight_norm, or take that off first"
        )
