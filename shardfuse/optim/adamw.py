"""``AdamW``: torch.optim.AdamW, with a step that is three kernels for any number of tensors, clipping included."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, cast

import torch

from ..executor.uncompiled import uncompiled
from .columns import NO_STATE
from .counted_pieces import as_mesh, note_failure_beside
from .dense import GRADIENT
from .gradient_norm import checked_bound, checked_exponent
from .kernel_text import KINDS
from .optim_errors import OptimizerArgumentError
from .update import Parameter, Update
from .update_kernels import Clipping

_OF_ALL = ("max_norm", "norm_type", "error_if_nonfinite", "master_weights")
"""Arguments that a param group cannot have of its own."""
_OWN = ("mesh", "placements")
"""Keys of a param group that say how plain tensors are sharded: facts of a run, and no part of a checkpoint."""
_NARROW = (torch.bfloat16, torch.float16)


_ROUNDED = -1e-12
"""Learning rates below 0 by no more than this: torch's LinearLR rounds one that ends at 0 to -5e-17 of the first."""


def check_groups(groups: Sequence[dict[str, Any]]) -> None:
    """Raises OptimizerArgumentError for hyper-parameters that make no step: schedulers and callers may have set them.

    A tensor on a GPU, which the host would have to wait for, may hold anything.
    """
    for k, group in enumerate(groups):
        if not _is_usual(group):
            where = f" of param_groups[{k}]"
            _check_own_ranges("AdamW.step", group, where)


def _is_usual(group: dict[str, Any]) -> bool:
    """Are its hyper-parameters floats in their ranges?  Each step asks, of each group."""
    lr, eps, weight_decay, betas = group["lr"], group["eps"], group["weight_decay"], group["betas"]
    if type(betas) is not tuple or len(cast("tuple[object, ...]", betas)) != 2:
        return False
    beta1, beta2 = cast("tuple[float, float]", betas)
    are_floats = type(lr) is type(eps) is type(weight_decay) is type(beta1) is type(beta2) is float
    return are_floats and lr >= _ROUNDED and eps >= 0 and weight_decay >= 0 and 0 <= beta1 < 1 and 0 <= beta2 < 1


def _numbers_of(call: str, group: dict[str, Any], where: str = "") -> dict[str, Any]:
    """The hyper-parameters, each number by its name.  Raises OptimizerArgumentError for what is none."""
    found: object = group["betas"]
    betas = cast("Sequence[object]", found) if isinstance(found, list | tuple) else ()
    if len(betas) != 2:
        raise OptimizerArgumentError(call, f"betas{where}", group["betas"], "two numbers")
    numbers: dict[str, object] = {key: group[key] for key in ("lr", "eps", "weight_decay")}
    numbers |= {"betas[0]": betas[0], "betas[1]": betas[1]}
    for name, value in numbers.items():
        if type(value) is float or isinstance(value, Real):
            continue
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise OptimizerArgumentError(call, f"{name}{where}", value, "a number, or a tensor of one")
    return numbers


def _check_ranges(call: str, numbers: dict[str, Any], where: str = "", least_rate: float = 0.0) -> None:
    """Raises OptimizerArgumentError for a number that makes no step, as a NaN."""
    for name, value in numbers.items():
        is_beta = name.startswith("betas")
        if not value >= (least_rate if name == "lr" else 0) or (is_beta and not value < 1):
            expected = "a number from 0 up to, but not including, 1" if is_beta else "a number, 0 or more"
            raise OptimizerArgumentError(call, f"{name}{where}", value, expected)


def _check_own_ranges(call: str, group: dict[str, Any], where: str) -> None:
    """``_check_ranges`` of a param group, but of tensors on a GPU, which the host would have to wait for."""
    numbers = _numbers_of(call, group, where)
    known = {name: n for name, n in numbers.items() if not isinstance(n, torch.Tensor) or n.device.type == "cpu"}
    _check_ranges(call, known, where, least_rate=_ROUNDED)


def _groups_in(params: object) -> list[Any]:
    """What the constructor is given, as a list.  Raises OptimizerArgumentError; for an empty list too."""
    expected = "a list of tensors, or of param groups"
    if isinstance(params, torch.Tensor):
        raise OptimizerArgumentError("AdamW", "params", params, expected)
    found = _listed(params, expected)
    if not found:
        raise OptimizerArgumentError("AdamW", "params", found, f"{expected}, with one or more")
    return found


def _parameters_in(given: object) -> list[Any]:
    """What is listed, as a list: tensors, or pairs of a name and a tensor.  Raises OptimizerArgumentError."""
    found: list[Any] = [given] if isinstance(given, torch.Tensor) else _listed(given, "a list of tensors")
    for k, entry in enumerate(found):
        pair = cast("tuple[object, ...]", entry) if isinstance(entry, tuple) else ("", entry)
        tensor = pair[1] if len(pair) == 2 else pair
        if not isinstance(tensor, torch.Tensor):
            raise OptimizerArgumentError("AdamW", f"params[{k}]", tensor, "a torch.Tensor")
        if not (tensor.is_leaf or tensor.retains_grad):
            expected = "a leaf, as what an op has made gets no gradient: pass the parameter itself"
            raise OptimizerArgumentError("AdamW", f"params[{k}]", tensor, expected)
    return found


def _listed(given: object, expected: str) -> list[Any]:
    if isinstance(given, set):
        given, expected = cast("object", given), f"{expected}, as the order in a set differs between runs"
        raise OptimizerArgumentError("AdamW", "params", given, expected)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise OptimizerArgumentError("AdamW", "params", given, expected)
    return list(cast("Iterable[Any]", given))


class AdamW(torch.optim.AdamW):
    """Adam with decoupled weight decay: ``torch.optim.AdamW`` in arguments, param groups, schedulers and state dicts.

    params, lr, betas, eps, weight_decay, amsgrad, maximize: torch's.  lr may be a float32 or float64 tensor; one on
    the GPU is read there, so that a CUDA graph sees what it holds at each replay.  foreach, capturable, fused: taken
    for torch's sake; every step may be captured, and nothing waits for the GPU.
    max_norm: gradients are clipped to this global norm within the step, as ``clip_grad_norm_`` clips them, but are not
    written: ``.grad`` stays what it was.  ``grad_norm`` is then the norm of the last step before clipping, a 0-dim
    tensor; ``max_norm=math.inf`` only measures.  norm_type, error_if_nonfinite: of that norm; the latter waits for the
    GPU in each step.
    master_weights: a float32 copy of each 16-bit parameter is kept (state ``"master"``), which is what is updated.

    Parameters: float32, bfloat16, float16 or float64, contiguous or not, plain or DTensors, on meshes that may differ,
    all on one device; those without a gradient stay as they are, and may be of any type.  A param group's ``"mesh"``
    and ``"placements"`` say how its plain tensors are sharded, which the norm has to know; they may be assigned between
    steps, as ``"lr"`` may.  Moments are float32, of float64 parameters float64, and on the parameter's device; so is
    ``"step"``.

    On a GPU a step is two kernels, three with max_norm, and then one all-reduce of 8 bytes where something is sharded:
    replicas are counted once.  Elsewhere torch's foreach ops do the same.  A DTensor's gradient that is sharded
    otherwise than it is, or is partial sums, is redistributed first, as by torch: a collective for each but where the
    gradient is replicated.

    Raises OptimizerTensorError (sparse gradients, several devices, memory that two parameters share),
    OptimizerArgumentError, NonFiniteNormError, each before anything is written.
    """

    _update: Update | None = None
    _fused: bool | None = None
    """The argument, as state dicts say it."""
    _key: tuple[object, ...] = ()
    _placed: list[object] = []  # noqa: RUF012 - never changed
    """Of each group its mesh and its placements, as the last update was made for them."""
    _tensors: list[torch.Tensor]
    _passed_over: list[torch.Tensor]
    _states: list[dict[str, Any]]
    _known: list[dict[str, Any]] = []  # noqa: RUF012 - never changed
    _steps: list[torch.Tensor | None] = []  # noqa: RUF012 - never changed
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
        for name, flag in (("error_if_nonfinite", error_if_nonfinite), ("master_weights", master_weights)):
            if not isinstance(flag, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise OptimizerArgumentError("AdamW", name, flag, "True or False")
        if differentiable:
            raise OptimizerArgumentError("AdamW", "differentiable", True, "False: torch.optim.AdamW has it")
        if error_if_nonfinite and max_norm is None:
            expected = "False without max_norm: no norm is measured; pass max_norm=math.inf to measure it alone"
            raise OptimizerArgumentError("AdamW", "error_if_nonfinite", True, expected)
        self.max_norm = None if max_norm is None else checked_bound("AdamW", max_norm)
        self.norm_type = checked_exponent("AdamW", norm_type)
        self.error_if_nonfinite = error_if_nonfinite
        self.master_weights = master_weights
        self.grad_norm: torch.Tensor | None = None
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        _check_ranges("AdamW", _numbers_of("AdamW", numbers))
        groups = _groups_in(params)
        super().__init__(groups, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)
        self._fused = fused
        self._as_fused()

    def _as_fused(self) -> None:
        """As torch has it of an optimiser whose steps are counted on the parameter's device; not in state dicts."""
        for group in (self.defaults, *self.param_groups):
            group["fused"] = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's.  ``"mesh"``, ``"placements"``: how its plain tensors are sharded.

        Raises OptimizerArgumentError for what only the whole optimiser has, and for hyper-parameters out of range,
        which torch checks of the constructor's alone.
        """
        if not isinstance(param_group, dict) or "params" not in param_group:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptimizerArgumentError("AdamW", "a param group", param_group, 'a dict with "params"')
        for key in _OF_ALL:
            if key in param_group:
                raise OptimizerArgumentError(
                    "AdamW", key, param_group[key], "an argument of AdamW, not of a param group"
                )
        if param_group.get("decoupled_weight_decay", True) is not True:
            raise OptimizerArgumentError(
                "AdamW", "decoupled_weight_decay", False, "True: torch.optim.Adam has the other"
            )
        where = f" of param_groups[{len(self.param_groups)}]"
        _check_own_ranges("AdamW", {**self.defaults, **param_group}, where)
        param_group["params"] = _parameters_in(param_group["params"])
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
        self._step()
        return loss

    @uncompiled
    def _step(self) -> None:
        try:
            self._checked_step()
        except Exception:
            where = [(p, g.get("mesh"), g.get("placements")) for g in self.param_groups for p in g["params"]]
            listed = [(p if p.grad is None else p.grad, mesh, placements) for p, mesh, placements in where]
            note_failure_beside(listed, is_normed=self.max_norm is not None)
            raise

    def _checked_step(self) -> None:
        clipping = None
        if self.max_norm is not None:
            bound, exponent = checked_bound("AdamW", self.max_norm), checked_exponent("AdamW", self.norm_type)
            clipping = Clipping(bound, exponent, self.error_if_nonfinite)
        update = self._updates(clipping)
        if update is None:
            return
        check_groups(self.param_groups)
        gradients = list(map(GRADIENT, update.tensors))
        states = self._states_of(update, gradients)
        self._counted(update, states)
        self.grad_norm = update.step(gradients, states, self.param_groups, clipping)
        if update.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured = [*getattr(self, "_captured", ()), update]  # whose buffers the graph writes

    def _updates(self, clipping: Clipping | None) -> Update | None:
        """What steps these parameters: that of the last step where all is as it was then; None where there are none."""
        tensors = [p for group in self.param_groups for p in group["params"]]
        groups = [(len(group["params"]), group["amsgrad"]) for group in self.param_groups]
        key = (groups, clipping and clipping.exponent, self.master_weights)
        update = self._update
        placed = [group.get(own) for group in self.param_groups for own in _OWN]
        is_same = update is not None and key == self._key and all(map(operator.is_, self._tensors, tensors))
        is_same = is_same and all(map(operator.is_, self._placed, placed))
        if update is not None and is_same and all(p.grad is None for p in self._passed_over) and update.fits():
            return update
        for group in self.param_groups:
            group["mesh"], group["placements"] = as_mesh("AdamW.step", group.get("mesh"), group.get("placements"))
        parameters = self._parameters()
        self._update = Update(parameters, clipping and clipping.exponent) if parameters else None
        listed = {id(p.tensor) for p in parameters}
        self._passed_over = [p for p in tensors if id(p) not in listed]
        self._key, self._tensors, self._states = key, tensors, []
        self._placed = [group[own] for group in self.param_groups for own in _OWN]
        return self._update

    def _parameters(self) -> list[Parameter]:
        """All that may be updated: what is of a type that cannot be is passed over as long as it has no gradient."""
        found: list[Parameter] = []
        k = -1
        for g, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for j, tensor in enumerate(group["params"]):
                k += 1
                if tensor.dtype not in KINDS and tensor.grad is None:
                    continue
                name = f"parameter {k}{f' ({names[j]})' if names else ''} of shape {list(tensor.shape)}"
                has_master = self.master_weights and tensor.dtype in _NARROW
                found.append(
                    Parameter(
                        tensor, g, name, group.get("mesh"), group.get("placements"), bool(group["amsgrad"]), has_master
                    )
                )
        return found

    def _states_of(self, update: Update, gradients: list[torch.Tensor | None]) -> list[dict[str, Any]]:
        """Of each parameter; those that have a gradient for the first time get one."""
        kept = self._states
        is_same = len(kept) == len(gradients) and len(self.state) == len(self._known)
        if is_same and all(map(operator.is_, self._known, self.state.values())):
            lacking = itertools.repeat(NO_STATE)
            if not any(map(operator.is_, kept, lacking)) or all(
                s is not NO_STATE or g is None for s, g in zip(kept, gradients, strict=True)
            ):
                return kept
        for parameter, gradient in zip(update.parameters, gradients, strict=True):
            if gradient is not None:
                self._fill_state(parameter)
        found = [self.state.get(p.tensor) or NO_STATE for p in update.parameters]
        self._states, self._known = found, list(self.state.values())
        return found

    def _counted(self, update: Update, states: list[dict[str, Any]]) -> None:
        """Counts of steps are float32 on the parameters' device, whoever put them there."""
        steps = [s["step"] for s in states]
        if len(steps) == len(self._steps) and all(map(operator.is_, steps, self._steps)):
            return
        for state in states:
            step = state["step"]
            if step is not None:
                given = step if isinstance(step, torch.Tensor) else torch.tensor(float(step), device="cpu")
                state["step"] = given.to(update.device, torch.float32)
        self._steps = [s["step"] for s in states]

    def _fill_state(self, parameter: Parameter) -> None:
        """Give the parameter's state what it lacks."""
        tensor, state = parameter.tensor, self.state[parameter.tensor]
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
        for key in ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if parameter.amsgrad else ())):
            if key not in state:
                state[key] = torch.zeros_like(tensor, dtype=wide, memory_format=torch.preserve_format)
        if not parameter.has_master:
            state.pop("master", None)  # which steps without it would leave behind
        elif "master" not in state:
            state["master"] = tensor.detach().to(wide, copy=True, memory_format=torch.preserve_format)

    def state_dict(self) -> dict[str, Any]:
        """As torch's.  ``max_norm``, meshes and placements are arguments of the constructor and no part of it."""
        found = super().state_dict()
        for group in found["param_groups"]:
            for key in _OWN:
                group.pop(key, None)
            group["fused"] = self._fused  # torch's fused kernels do not take all that is stepped here
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, from this class or ``torch.optim.AdamW``; moments that are wider than parameters stay so."""
        said = [{key: group.get(key) for key in _OWN} for group in self.param_groups]
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
        state = self.state[tensor]
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        for key, value in given.items():
            if key == "step":
                value = value if isinstance(value, torch.Tensor) else torch.tensor(float(value), device="cpu")
                state[key] = value.to(device=tensor.device, dtype=torch.float32, copy=True)
            elif isinstance(value, torch.Tensor) and value.is_floating_point():
                state[key] = value.to(device=tensor.device, dtype=wide)

    def __getstate__(self) -> dict[str, Any]:
        own = {key: getattr(self, key) for key in (*_OF_ALL, "_fused")}
        return {**super().__getstate__(), **own, "grad_norm": None}
