"""LayerNorm, and norms of a residual sum with dropout, on tensors that are whole or sharded over a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from ..mesh import DeviceMesh
from .parameters import ParameterKind
from .residual_norm import ResidualNorm
from .row_norm import InputNorm, NormSwitches
from .settings import Setting, checked_module

if TYPE_CHECKING:
    from .placement import Placements


@checked_module
class LayerNorm(InputNorm):
    """LayerNorm over the last dims, as torch.nn.LayerNorm: y = (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias.

    normalized_shape: sizes of these dims, or of the last one.
    elementwise_affine: whether there are a weight and a bias.
    bias: whether there is a bias where there is a weight.  Names, shapes and meaning of parameters are torch's.
    mesh, input, output, output_grad, parameters: as of ``RMSNorm``.  A hidden axis is sharded as ``Shard(-1)``, for a
    ``normalized_shape`` of one dim; each row's statistics are then one exchange of a few numbers.
    x: [..., *normalized_shape] in float64, float32, bfloat16 or float16; statistics are in float32 or float64.
    Raises PlacementError, ModuleArgumentError; a call raises ModuleInputError.  Source: Ba, Kiros & Hinton 2016.
    """

    family = "layer_norm"

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        mesh: DeviceMesh | None = None,
        input: Placements | None = None,
        output: Placements | None = None,
        output_grad: Placements | None = None,
        parameters: ParameterKind = "dtensor",
    ) -> None:
        switches = NormSwitches(True, elementwise_affine, elementwise_affine and bias, False, 0.0)
        super().__init__(
            normalized_shape, eps, switches, mesh=mesh, parameters=parameters,
            input=input, output=output, output_grad=output_grad, device=device, dtype=dtype,
        )  # fmt: skip


@checked_module
class AddLayerNorm(ResidualNorm):
    """The sum of a residual and x, and its LayerNorm, in one fusion.

    new_residual = residual + x (+ input_bias); normed = the LayerNorm of new_residual.  A call returns normed and
    new_residual.  Arguments are those of ``LayerNorm``, and

    residual: how the residual is placed, and the new residual with its gradient too; the norm is computed there.
    Replicate where it is left out, whatever ``input`` is.
    input_bias: whether there is a bias of the matmul before, which is added once to the sum of all summands.
    """

    family = "add_layer_norm"

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        input_bias: bool = False,
        mesh: DeviceMesh | None = None,
        input: Placements | None = None,
        residual: Placements | None = None,
        output: Placements | None = None,
        output_grad: Placements | None = None,
        parameters: ParameterKind = "dtensor",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        switches = NormSwitches(True, elementwise_affine, elementwise_affine and bias, input_bias, 0.0)
        super().__init__(
            normalized_shape, eps, switches, mesh=mesh, parameters=parameters, residual=residual,
            input=input, output=output, output_grad=output_grad, device=device, dtype=dtype,
        )  # fmt: skip


@checked_module
class DropoutAddNorm(ResidualNorm):
    """Dropout, the sum with a residual, and its LayerNorm or RMSNorm, in one fusion.

    new_residual = residual + dropout(x (+ input_bias)); normed = the norm of new_residual.  A call returns normed and
    new_residual.  Arguments are those of ``AddLayerNorm``, and

    p: probability that an element of x is dropped; the others are multiplied by 1 / (1 - p).  In ``eval()`` none is.
    norm: "layer" or "rms"; eps is 1e-5 or 1e-6 where it is left out.  A "rms" norm has no bias.

    The numbers are drawn by torch's generator of the device, one draw a call, so that ``torch.manual_seed`` repeats
    them and activation checkpointing replays them; the backward reads the mask of the forward, one byte an element.
    On a mesh all ranks draw by the first one's seed, and drop what one rank would, however x is sharded.
    """

    family = "dropout_add_norm"
    is_random = True
    p: Setting[float] = Setting()
    norm: Setting[str] = Setting()

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        p: float = 0.5,
        eps: float | None = None,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        norm: Literal["layer", "rms"] = "layer",
        input_bias: bool = False,
        mesh: DeviceMesh | None = None,
        input: Placements | None = None,
        residual: Placements | None = None,
        output: Placements | None = None,
        output_grad: Placements | None = None,
        parameters: ParameterKind = "dtensor",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.check_argument("norm", norm, norm in ("layer", "rms"), '"layer" or "rms"')
        self.check_argument("p", p, 0 <= p <= 1, "a probability from 0 to 1")
        is_layer = norm == "layer"
        switches = NormSwitches(is_layer, elementwise_affine, elementwise_affine and bias and is_layer, input_bias, 0.0)
        eps = (1e-5 if is_layer else 1e-6) if eps is None else eps
        super().__init__(
            normalized_shape, eps, switches, mesh=mesh, parameters=parameters, residual=residual,
            input=input, output=output, output_grad=output_grad, device=device, dtype=dtype,
        )  # fmt: skip
        self.__dict__.update(p=p, norm=norm)  # past what checks the settings of a module that is made
        self.describe()

    def settings(self) -> dict[str, object]:
        return {**super().settings(), "p": self.p, "norm": self.norm, "training": self.training}

    @classmethod
    def made_again(cls, settings: Mapping[str, Any]) -> Self:
        made = super().made_again({name: value for name, value in settings.items() if name != "training"})
        made.training = settings["training"]
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "norm" and "text" in self.__dict__:  # parameters and fusions are those of the norm it was made with
            expected = f'"{self.norm}", as the module was made with: make another one'
            self.check_argument("norm", value, value == self.norm, expected)
        super().__setattr__(name, value)
        if name == "training" and "text" in self.__dict__:  # by train() and eval(): it chooses the fusions
            self.describe()

    @property
    def dropout(self) -> float | None:
        """The probability of this call; None where nothing is dropped."""
        return self.p if self.training and self.p else None

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}"
