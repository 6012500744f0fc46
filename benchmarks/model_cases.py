"""The cases of the suite ``models``: each model at the size that it is trained in, and a tiny one for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from .nets.images import ConvNext, Dit, ResNet, Unet, Vit
from .nets.text import Bert, Decoder, Gpt2, TextConfig

Precision = Literal["autocast", "bfloat16", "float32"]
TINY_DROPOUT = 0.125
"""Which bfloat16 has: torch's comparison on a CPU rounds others, and then keeps other elements than on a GPU."""


@dataclass(frozen=True)
class ModelCase:
    """``build`` gives a model in float32, ``batch`` what it takes; both draw from torch's generator, on the CPU.

    ``precision``: "autocast", where weights stay in float32 and the forward is under autocast to bfloat16; otherwise
    the dtype of everything.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    precision: Precision = "autocast"
    channels_last: bool = False
    dropout: bool = False
    rate: float = 1e-2

    @property
    def autocast(self) -> bool:
        return self.precision == "autocast"

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and inputs."""
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32

    def model(self, device: torch.device) -> nn.Module:
        """The same weights each time."""
        torch.manual_seed(0)
        with torch.device(device):
            model = self.build()
        model = model.to(device, self.dtype).train()
        return model.to(memory_format=torch.channels_last) if self.channels_last else model

    def inputs(self, device: torch.device) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        found: list[Tensor] = []
        for x in self.batch():
            x = x.to(device)
            if x.is_floating_point():
                x = x.to(self.dtype)
            found.append(x.contiguous(memory_format=torch.channels_last) if self._is_image(x) else x)
        return tuple(found)

    def _is_image(self, x: Tensor) -> bool:
        return self.channels_last and x.ndim == 4


def text_batch(batch: int, length: int, classes: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(classes, (batch, length)), torch.randint(classes, (batch, length)))


def image_batch(batch: int, side: int, classes: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(batch, 3, side, side), torch.randint(classes, (batch,)))


def _latents(batch: int, side: int, halved: int, time: int) -> Callable[[], tuple[Tensor, ...]]:
    small = side >> halved
    return lambda: (
        torch.randn(batch, 4, side, side),
        torch.randn(batch, time),
        torch.randn(batch, 4, small, small),
    )


def _tokens(batch: int, length: int, dim: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(batch, length, dim), torch.randn(batch, dim), torch.randn(batch, length, dim))


def chosen(only: Sequence[str], names: Iterable[str]) -> list[str]:
    """Those of ``names`` of which one of ``only`` is a part, in small or capital letters; all where it is empty."""
    return [n for n in names if not only or any(part.lower() in n.lower() for part in only)]


def model_cases(*, tiny: bool = False, layers: int | None = None) -> dict[str, ModelCase]:
    """By name.  ``layers``: instead of a text model's or ViT's own, to try things out."""
    cases = [*_text_cases(tiny=tiny, layers=layers), *_image_cases(tiny=tiny, layers=layers)]
    return {case.name: case for case in cases}


def _text_cases(*, tiny: bool, layers: int | None) -> list[ModelCase]:
    if tiny:
        bert = gpt2 = TextConfig(64, 2, 2, 128, 97, 16, TINY_DROPOUT)
        qwen = gemma = TextConfig(64, 2, 4, 128, 97, 16, 0.0, 2, 16)
        words = dict.fromkeys(("bert", "gpt2", "decoder"), (2, 16))
    else:
        bert = TextConfig(1024, layers or 24, 16, 4096, 30522, 512)
        gpt2 = TextConfig(1024, layers or 24, 16, 4096, 50257, 1024)
        qwen = TextConfig(1024, layers or 4, 16, 3072, 151936, 2048, 0.0, 8, 128)
        gemma = TextConfig(1152, layers or 4, 4, 6912, 262144, 2048, 0.0, 1, 256)
        words = {"bert": (16, 512), "gpt2": (8, 1024), "decoder": (2, 2048)}
    return [
        ModelCase("BERT-large", lambda: Bert(bert), text_batch(*words["bert"], bert.classes), dropout=True),
        ModelCase("GPT-2 medium", lambda: Gpt2(gpt2), text_batch(*words["gpt2"], gpt2.classes), dropout=True),
        ModelCase(
            "Qwen3-0.6B layers",
            lambda: Decoder(qwen, gemma=False),
            text_batch(*words["decoder"], qwen.classes),
            precision="bfloat16",
        ),
        ModelCase(
            "Gemma3-1B layers",
            lambda: Decoder(gemma, gemma=True),
            text_batch(*words["decoder"], gemma.classes),
            precision="bfloat16",
        ),
    ]


def _image_cases(*, tiny: bool, layers: int | None) -> list[ModelCase]:
    if tiny:
        resnet, convnext = (lambda: ResNet((1, 1), 8, 10)), (lambda: ConvNext((1, 1), 8, 10))
        vit, unet, dit = (
            (lambda: Vit(32, 2, 2, 8, 16, 10)),
            (lambda: Unet((32, 64), 1, 16, TINY_DROPOUT)),
            (lambda: Dit(32, 2, 1)),
        )
        images = {"resnet": image_batch(2, 32, 10), "convnext": image_batch(2, 32, 10), "vit": image_batch(2, 16, 10)}
        latents, tokens = _latents(2, 8, 1, 16), _tokens(2, 8, 32)
    else:
        resnet, convnext = (lambda: ResNet((3, 4, 6, 3), 64, 1000)), (lambda: ConvNext((3, 3, 27, 3), 192, 1000))
        vit = lambda: Vit(1024, layers or 24, 16, 16, 224, 1000)  # noqa: E731 - beside the others
        unet, dit = (lambda: Unet((320, 640, 1280), 2, 1280, 0.1)), (lambda: Dit(1152, 16, 2))
        images = {
            "resnet": image_batch(128, 224, 1000),
            "convnext": image_batch(32, 224, 1000),
            "vit": image_batch(32, 224, 1000),
        }
        latents, tokens = _latents(16, 64, 2, 1280), _tokens(16, 1024, 1152)
    # where a step overshoots, a rounding more or less grows a thousandfold: the wide ones' losses rise at 1e-3
    unet_rate, vit_rate = (1e-2, 1e-2) if tiny else (2e-4, 3e-4)
    return [
        ModelCase("ResNet-50", resnet, images["resnet"], channels_last=True),
        ModelCase("ConvNeXt-L", convnext, images["convnext"], channels_last=True),
        ModelCase("ViT-L", vit, images["vit"], rate=vit_rate),
        ModelCase("UNet blocks", unet, latents, dropout=True, rate=unet_rate),
        ModelCase("UNet blocks, channels-last", unet, latents, channels_last=True, dropout=True, rate=unet_rate),
        ModelCase("DiT block", dit, tokens),
    ]
