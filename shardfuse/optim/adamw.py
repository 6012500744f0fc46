"""``AdamW``: torch.optim.AdamW, with a step that is three kernels for any number of tensors, clipping included."""

from __future__ import annotations


import operator
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from .dense import GRADIENT
from .errors import OptimizerArgumentError
from .norm import checked_exponent
from .pieces import as_mesh
from .update import Parameter, Update
from .update_kernels import Clipping

_OWN = ("mesh", "placements")
"""Keys of a param group that say how plain tensors are sharded: facts of a run, and no part of a checkpoint."""
_NARROW = (torch.bfloat16, torch.float16)


class AdamW(torch.optim.AdamW):
    """Adam with decoupled weight decay: ``torch.optim.AdamW`` in arguments, param groups, schedulers and state dicts.

    params, lr, betas, eps, weight_decay, amsgrad, maximize: torch's.  lr may be a float32 or float64 tensor; one on
    the GPU is read there, so that a CUDA graph sees what it holds at each replay.  foreach, capturable, fused: taken
    for torch's sake; every step may be captured, and nothing waits for the GPU.
    max_norm: gradients are clipped to this global norm within the step, as ``clip_grad_norm_`` clips them, but are not
    written: ``.grad`` stays what it was.  ``grad_norm`` is then the norm of the last step before clipping, a 0-dim
    tensor; ``max_norm=math.inf`` only measures.  norm_type, error_if_nonfinite: of that norm.
    master_weights: a float32 copy of each 16-bit parameter is kept (state ``"master"``), which is what is updated.

    Parameters: float32, bfloat16, float16 or float64, contiguous or not, plain or DTensors, on meshes that may differ,
    all on one device; those without a gradient stay as they are.  A param group's ``"mesh"`` and ``"placements"`` say
    how its plain tensors are sharded, which the norm has to know.  Moments are float32, of float64 parameters float64,
    and on the parameter's device; so is ``"step"``.

    On a GPU a step is two kernels, three with max_norm, and then one all-reduce of 8 bytes where something is sharded:
    replicas are counted once.  Elsewhere torch's foreach ops do the same.

    Raises OptimizerTensorError (sparse or ``Partial`` gradients, several devices, memory that two parameters share),
    OptimizerArgumentError, NonFiniteNormError, each before anything is written.
    """

    _update: Update | None = None
    _key: tuple[object, ...] = ()
    _captured: list[Update]

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        master_weights: bool = False,
    ) -> None:
        if differentiable:
            raise OptimizerArgumentError("AdamW", "differentiable", True, "False: torch.optim.AdamW has it")
        if max_norm is not None and not max_norm > 0:
            raise OptimizerArgumentError("AdamW", "max_norm", max_norm, "a number above 0, or None")
        self.max_norm = max_norm
        self.norm_type = checked_exponent("AdamW", norm_type)
        self.error_if_nonfinite = error_if_nonfinite
        self.master_weights = master_weights
        self.grad_norm: torch.Tensor | None = None
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)
        self._as_fused()

    def _as_fused(self) -> None:
        """State dicts say what torch's own optimiser of this kind does: steps are counted on the parameter's device."""
        for group in (self.defaults, *self.param_groups):
            group["fused"] = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's.  ``"mesh"``, ``"placements"``: how its plain tensors are sharded."""
        param_group["mesh"], param_group["placements"] = as_mesh(
            "AdamW", param_group.get("mesh"), param_group.get("placements")
        )
        super().add_param_group(param_group)
        self._update = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of all parameters that have a gradient.  closure: as torch's; its result is returned.

        Collective where ``max_norm`` is set and something is sharded.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        clipping = None
        if self.max_norm is not None:
            clipping = Clipping(float(self.max_norm), self.norm_type, self.error_if_nonfinite)
        tensors = [p for group in self.param_groups for p in group["params"]]
        gradients = list(map(GRADIENT, tensors))
        found = self._found(tensors, gradients, clipping)
        if found is not None:
            self.grad_norm = found.step([g for g in gradients if g is not None], self.param_groups, clipping)
            if found.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                self._captured = [*getattr(self, "_captured", ()), found]  # whose buffers the graph writes
        return loss

    def _found(
        self, tensors: list[torch.Tensor], gradients: list[torch.Tensor | None], clipping: Clipping | None
    ) -> Update | None:
        """What steps these parameters: that of the last step where all is as it was then."""
        pattern = tuple(g is not None for g in gradients)
        amsgrads = tuple(bool(group["amsgrad"]) for group in self.param_groups)
        key = (len(tensors), pattern, amsgrads, clipping and clipping.exponent, self.master_weights, id(self.state))
        update = self._update
        if update is not None and key == self._key:
            is_same = len(self.state) == len(self._states) and all(map(operator.is_, self._tensors, tensors))
            if is_same and all(map(operator.is_, self._states, self.state.values())):
                return update
        parameters = self._parameters(pattern)
        if not parameters:
            return None
        states = [self._state_of(p) for p in parameters]
        update = Update(parameters, states, clipping and clipping.exponent)
        self._update, self._key, self._tensors = update, key, tensors
        self._states = list(self.state.values())
        return update

    def _parameters(self, has_gradient: tuple[bool, ...]) -> list[Parameter]:
        found: list[Parameter] = []
        places = iter(enumerate(has_gradient))
        for g, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for j, tensor in enumerate(group["params"]):
                k, is_taken = next(places)
                if not is_taken:
                    continue
                name = f"parameter {k}{f' ({names[j]})' if names else ''} of shape {list(tensor.shape)}"
                has_master = self.master_weights and tensor.dtype in _NARROW
                found.append(
                    Parameter(tensor, g, name, group["mesh"], group["placements"], bool(group["amsgrad"]), has_master)
                )
        return found

    def _state_of(self, parameter: Parameter) -> dict[str, Any]:
        """The parameter's state, with what it lacks."""
        tensor, state = parameter.tensor, cast("dict[str, Any]", self.state[parameter.tensor])
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
        for key in ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if parameter.amsgrad else ())):
            if key not in state:
                state[key] = torch.zeros_like(tensor, dtype=wide, memory_format=torch.preserve_format)
        if parameter.has_master and "master" not in state:
            state["master"] = tensor.detach().to(wide, copy=True, memory_format=torch.preserve_format)
        return state

    def state_dict(self) -> dict[str, Any]:
        """As torch's.  ``max_norm`` and what was said of meshes are arguments of the constructor and no state."""
        found = super().state_dict()
        for group in found["param_groups"]:
            for key in _OWN:
                group.pop(key, None)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, from this class or ``torch.optim.AdamW``; moments that are wider than parameters stay so."""
        said = [{key: group[key] for key in _OWN} for group in self.param_groups]
        taken: dict[str, Any] = {}

        def take(_: torch.optim.Optimizer, given: dict[str, Any]) -> None:
            taken.update(given)

        hook = self.register_load_state_dict_pre_hook(take)  # the last: it sees what is loaded
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        for group, own in zip(self.param_groups, said, strict=True):
            group.update(own)
        self._as_fused()
        saved = [number for group in taken["param_groups"] for number in group["params"]]
        tensors = [p for group in self.param_groups for p in group["params"]]
        for number, tensor in zip(saved, tensors, strict=True):
            if number in taken["state"]:
                self._widen(tensor, taken["state"][number])
        self._update = None

    def _widen(self, tensor: torch.Tensor, given: dict[str, Any]) -> None:
        """torch rounds all of a state to the parameter's type when it loads it: take what was given once more."""
        state = cast("dict[str, Any]", self.state[tensor])
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        for key, value in given.items():
            if key == "step":
                value = value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
                state[key] = value.to(device=tensor.device, dtype=torch.float32, copy=True)
            elif isinstance(value, torch.Tensor) and value.is_floating_point():
                state[key] = value.to(device=tensor.device, dtype=wide)

    def __getstate__(self) -> dict[str, Any]:
        own = {key: getattr(self, key) for key in ("max_norm", "norm_type", "error_if_nonfinite", "master_weights")}
        return {**cast("dict[str, Any]", super().__getstate__()), **own, "grad_norm": None}
