"""Autograd around two fusions, and the modules that hold them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import torch

from ..frontend import FusionDefinition
from ..frontend.argument_checks import ranks_of
from ..frontend.detection import has_dtensor
from ..frontend.profiled import profiler
from ..mesh import DeviceMesh
from ..source_line import caller_line
from .bound_op import BoundOp as BoundOp
from .bound_op import Take as Take
from .checks import Checks
from .dtensor_autograd import Given, on_local_input
from .fusion_run import LastCall
from .module_hooks import has_no_hooks
from .of_linear import handed_on
from .output_shapes import OutputShapes
from .placement import TensorPlacement
from .promising import PromisingModule
from .refused_calls import refuse
from .saved_versions import check_behind, watch
from .settings import Setting, printed
from .shaping import Shaping
from .tensor_kinds import PLAIN as PLAIN
from .tensor_kinds import Specs, is_traced, metadata_of, modes, plain_metadata_of, specs_of
from .timer import FusionTimer
from .transforms import check_not_traced


@dataclass(frozen=True)
class FusedOp:
    """Two fusions that are each other's derivative, on local tensors.

    forward: (tensors) -> (results..., extras...), of which the first ``results`` are the op's.
    backward: (gradients of the results..., saved...) -> gradients; None of what has no gradient.
    saved: what backward reads, as indices into (tensors..., results..., extras...).
    arguments: where each tensor lives; gradients: where the gradient of each result does.
    order: for each of the first tensors, which output of backward is its gradient; the others have none.
    follows: for each output of forward the tensor that its dims are like, where forward cuts or regroups dims.
    ones: dims, counted from the end, of which all outputs have one element though that tensor has more.
    is_view: may a result lie in the storage of a tensor?  Then a copy of it is the result, which the caller may change.
    deferred: the same with the gradients of parameters as this rank's summands of them.
    """

    forward: FusionDefinition
    backward: FusionDefinition | None
    results: int
    saved: tuple[int, ...]
    arguments: tuple[TensorPlacement, ...]
    gradients: tuple[TensorPlacement, ...]
    order: tuple[int, ...]
    is_view: bool = False
    follows: tuple[int, ...] = ()
    ones: tuple[int, ...] = ()
    deferred: Callable[[], FusedOp] | None = None

    @cached_property
    def fusions(self) -> tuple[FusionDefinition, ...]:
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    @property
    def sends(self) -> bool | None:
        """Do ranks send one another anything in its fusions?  None where that is not known yet."""
        found = {fd.sends for fd in self.fusions}
        return True if True in found else None if None in found else False

    @property
    def team(self) -> tuple[int, ...]:
        """The ranks that run its fusions together, ascending."""
        return tuple(sorted({rank for fd in self.fusions for rank in ranks_of(fd.fusion)}))

    @cached_property
    def shapes(self) -> OutputShapes:
        """Of the outputs of ``forward``."""
        return OutputShapes(self.forward.fusion, self.arguments, self.follows, self.ones)

    def apply(
        self, timer: FusionTimer | None, unsharded: Sequence[int] | None, *tensors: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """The results, recorded for autograd.

        ``unsharded``: the shape of the activations, where it is known; it says what uneven shards are parts of.
        """
        return BoundOp(self, unsharded, tensors, name=f"shardfuse.nn.{type(self).__name__}")(timer, tensors)


_MISSED: Any = object()
_BOUND = 256
"""Sizes for which one module keeps its fusions; a batch size is one of them."""


class FusedModule(Checks, PromisingModule):
    """A module whose forward and backward are fusions.

    A call looks its tensors' metadata up and runs the fusions that are bound for them (``run``); what is not found is
    checked and bound (``bind``).  Under torch.compile it is one op of the graph, ``shardfuse::<family>_v1``, that knows
    the module by the text of its settings.

    What it refuses on one rank, before there is a program to compare, the other ranks of its mesh are told.  Its errors
    name the line of the caller's program that made it.
    """

    family: ClassVar[str] = ""
    """The name of its op."""
    library_op: ClassVar[Any] = None
    defined: ClassVar[Any] = None
    """The class of which a module is made again from its settings, where this is a subclass of it."""
    argument_names: ClassVar[Mapping[str, str]] = {}
    """What the class calls an argument where the setting that it gives has another name."""
    checked_in_calls: ClassVar[frozenset[str]] = frozenset()
    """Settings that have to fit others, which may be assigned after them."""
    is_random: ClassVar[bool] = False
    """May a call draw random numbers?"""
    mesh: Setting[DeviceMesh | None] = Setting()
    text: str
    """The settings, printed."""

    def __init__(self) -> None:
        super().__init__()
        line = caller_line(in_modules=True)
        self.made_at = () if line is None else (f"{line}  # {type(self).__name__}",)
        self._bound: dict[Hashable, BoundOp | None] = {}
        self._ready: dict[Hashable, tuple[BoundOp, Specs]] = {}
        """Of those, by less than all that they were found by: tensors are compared with those of a call before."""
        self._last_call: LastCall | None = None
        self.described: dict[Hashable, BoundOp] = {}
        """The settings of tensors that are passed as text to an op of torch's."""

    def __call__(self, *tensors: object, **named: object) -> Any:
        if named and self.input_name in named:
            tensors = (named.pop(self.input_name), *tensors)
        if torch.compiler.is_compiling():
            if tensors:
                self.check_type("the first argument", tensors[0])
            return super().__call__(*tensors, **named)
        try:
            if not profiler._is_profiler_enabled and has_no_hooks(self):
                return self.forward(*tensors, **named)
            return super().__call__(*tensors, **named)
        except Exception as error:
            refuse(self, error, tensors, named)
            raise

    @property
    def checked_name(self) -> str:
        return type(self).__name__

    def _name_in_errors(self) -> str:
        """The name by which errors about its runs call it: a caller's subclass is not of shardfuse.nn."""
        is_own = type(self).__module__.startswith("shardfuse.")
        return f"shardfuse.nn.{self.checked_name}" if is_own else self.checked_name

    def settings(self) -> dict[str, object]:
        """The arguments that make such a module: numbers, strings, None, a DeviceMesh and TensorPlacements."""
        raise NotImplementedError

    @classmethod
    def made_again(cls, settings: Mapping[str, Any]) -> Self:
        """A module of these settings, to bind fusions by; its parameters are never read."""
        return cls(**settings)

    def bind(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> FusedOp:
        """Check local tensors (their metadata alone), in the order of the op, and find the fusions for them.

        Raises ModuleInputError and PlacementError.
        """
        raise NotImplementedError

    def whole(self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None) -> Sequence[int] | None:
        """The unsharded shape of the activations, where the caller has said it or local tensors tell it."""
        return unsharded

    def take(self, parameter: torch.Tensor) -> Take | None:
        """How the local tensor is had of a parameter that is a DTensor; None for any other tensor."""
        return None

    def describe(self) -> None:
        """Print the settings; what was bound for others is let go of.  Each module's __init__ ends with it.

        A thread that is still in a call keeps what it has bound in the dicts that are let go of.
        """
        self._bound, self._ready, self._last_call, self.described = {}, {}, None, {}
        if not self.family:
            return
        self.__dict__["text"] = printed({**self.settings(), **self.common_settings()})

    def run(
        self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None, shaping: Shaping | None = None,
        origins: Sequence[torch.Tensor] = (),
    ) -> Sequence[torch.Tensor]:  # fmt: skip
        """The results on local tensors, or parameters that are DTensors, in the order of the op.

        shaping: between them and the op's, where they have other dims.  unsharded, origins: as the op has them.
        """
        if torch.compiler.is_compiling():
            self.check_devices(tensors)
            return self.as_op([self.traced(t) for t in tensors], unsharded, shaping)
        if unsharded is None:
            found = self.run_again(tensors, shaping, origins)
            if found is not None:
                return found
        ready = self._ready
        of_each = plain_metadata_of if PLAIN.issuperset(map(type, tensors)) else metadata_of
        key = (unsharded if unsharded is None else tuple(unsharded), shaping, *map(of_each, tensors))
        bound = self._bound.get(key, _MISSED)
        if bound is _MISSED:
            bound = self.bound_for(key, tensors, unsharded, shaping)
        if bound is None or modes() or tensors[0].is_meta:
            takes = map(self.take, tensors)
            local = [t if take is None else take(t) for t, take in zip(tensors, takes, strict=True)]
            results = self.as_op(local, unsharded, shaping)
            if bound is not None:
                check_behind(results, watch(origins or tensors, tensors, bound.op.saved))
            return results
        specs = specs_of(tensors) if unsharded is None else None
        if specs is not None:
            ready[tensors[0].shape, len(tensors), shaping] = bound, specs
        product = handed_on.product
        if product is not None and product.made is tensors[0]:
            return product.through(bound, self.timer, tensors, origins)
        return bound(self.timer, tensors, origins)

    def run_again(
        self,
        tensors: Sequence[torch.Tensor],
        shaping: Shaping | None = None,
        origins: Sequence[torch.Tensor] = (),
    ) -> Sequence[torch.Tensor] | None:
        """As ``run``, of tensors like those of a call before, known by one look; else None."""
        ready, shape = self._ready, tensors[0].shape
        found = ready.get((shape, len(tensors), shaping))
        if found is None or modes():
            return None
        bound, specs = found
        known = bound.known[torch.is_grad_enabled()]
        if known is None:
            return None
        if specs:
            if any(getattr(tensors[k], "_spec", None) is not spec for k, spec in specs):
                return None
            origins, tensors = origins or tensors, bound.taken(tensors)
        if not known.check(*tensors):
            return None
        product = handed_on.product
        if product is not None and product.made is tensors[0]:
            return product.again(bound, known, self.timer, tensors, origins)
        if known.is_direct and self.timer is None:
            # past torch's __setattr__, which takes longer
            vars(self)["_last_call"] = LastCall(known.check, known.again, specs, bound.taken, shape, ready)
            outputs = known.again(tensors)
            return outputs if outputs is None or len(outputs) == bound.op.results else outputs[: bound.op.results]
        return bound.again(known, self.timer, tensors, origins)

    def bound_for(
        self, key: Hashable, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None,
        shaping: Shaping | None = None,
    ) -> BoundOp | None:  # fmt: skip
        """The fusions for such tensors; None where they hold no data, so that torch has to take the op."""
        kept = self._bound
        bound = kept.get(key, _MISSED)
        if bound is _MISSED:
            if len(kept) >= _BOUND:
                kept.clear()
                self._ready.clear()
            bound = kept[key] = self._bind(tensors, unsharded, shaping)
        return bound

    def bound_fusions(self) -> list[FusionDefinition]:
        """Those that its calls so far have run, or their backwards run."""
        return [fd for bound in self._bound.values() if bound is not None for fd in bound.op.fusions]

    def as_op(
        self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None, shaping: Shaping | None
    ) -> Sequence[torch.Tensor]:
        """The results on local tensors, and what the backward reads, as one op of torch's dispatcher."""
        entered = list(tensors if shaping is None else shaping.enter(tensors))
        results = self.library_op(entered, self.text, None if unsharded is None else list(unsharded))
        return results if shaping is None else shaping.leave(results)

    def traced(self, parameter: torch.Tensor) -> torch.Tensor:
        """The local tensor of a parameter that is a DTensor, in words that torch.compile knows."""
        return parameter

    def _bind(
        self, tensors: Sequence[torch.Tensor], unsharded: Sequence[int] | None, shaping: Shaping | None
    ) -> BoundOp | None:
        check_not_traced()
        takes = [self.take(t) for t in tensors]
        with torch.no_grad():
            local = [t if take is None else take(t) for t, take in zip(tensors, takes, strict=True)]
        entered = local if shaping is None else shaping.enter(local)
        if unsharded is not None and shaping is None:
            self.check_sizes(unsharded, entered[0])
        op = self.bind(entered, unsharded)
        if unsharded is not None:
            self.check_whole(unsharded, self.mesh, op.arguments, entered[0], shaping is not None)
        if shaping is not None and shaping.is_deferred:
            assert op.deferred is not None, "whoever asks for it knows that there is one"
            op = op.deferred()
        op = self.promised_op(op)
        if any(is_traced(t) for t in local):
            return None
        taken = takes if any(take is not None for take in takes) else ()
        return BoundOp(op, self.whole(entered, unsharded), local, taken, shaping, name=self._name_in_errors())

    def __getstate__(self) -> dict[str, object]:
        """Without what is bound to this process, or to other modules."""
        unbound: dict[str, object] = {
            "_bound": {},
            "_ready": {},
            "described": {},
            "_last_call": None,
            "bucket": None,
            "_fits": None,
        }
        return {**self.__dict__, **unbound}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # pyright: ignore[reportUnknownMemberType]
        self.describe()

    def on_dtensor(
        self, call: Callable[..., torch.Tensor], x: torch.Tensor, at: TensorPlacement, unsharded: Sequence[int] | None,
        result: tuple[TensorPlacement, TensorPlacement] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """``on_local_input`` of a DTensor x, whose shape the caller may have passed too."""
        self.check_said(unsharded, x.shape, "x")
        return on_local_input(call, self.mesh, x, at, result)

    def unsharded_of(self, given: Sequence[Given], unsharded: Sequence[int] | None) -> tuple[int, ...]:
        """The shape of those that are DTensors.  Raises ModuleInputError where they, or ``unsharded``, differ."""
        first, *others = (g for g in given if has_dtensor((g.tensor,)))
        for other in others:
            self.check_same(other.name, other.tensor, first.name, first.tensor.shape)
        self.check_said(unsharded, first.tensor.shape, first.name)
        return tuple(first.tensor.shape)
