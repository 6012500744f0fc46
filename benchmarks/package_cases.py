"""The cases of the suite ``packages``: models as torchvision and transformers give them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from .model_cases import ModelCase, Precision, image_batch, text_batch
from .nets.packaged import Classifier, LanguageModel

VOCABULARY = 50304
NOTHING: Mapping[str, float] = MappingProxyType({})


def package_cases() -> dict[str, ModelCase]:
    """By name."""
    return {case.name: case for case in (*_torchvision(), *_transformers())}


def why_absent(name: str) -> str | None:
    """What a case needs and this environment has not."""
    package = "torchvision" if name in {case.name for case in _torchvision()} else "transformers"
    return None if find_spec(package) else f"{name} is a model of {package}, which is not installed"


def _torchvision() -> list[ModelCase]:
    def of(name: str, model: str, batch: int, options: Mapping[str, float] = NOTHING, **rest: Any) -> ModelCase:
        return ModelCase(name, partial(Classifier, model, **options), image_batch(batch, 224, 1000), **rest)

    # where a network squeezes, gradients of 4 to 48 elements are rounding errors by half, which only those of the same
    # network in float32 tell from faults: nothing is dropped, as eager torch drops other elements
    whole = {"dropout": 0.0}

    return [
        of("ResNet-18, float32", "resnet18", 128, precision="float32"),
        of("ResNet-50, contiguous", "resnet50", 64),
        of("ConvNeXt-T", "convnext_tiny", 64, dropout=True, rate=1e-3),
        of("Swin-T", "swin_t", 64, dropout=True, rate=1e-3),
        of("RegNetY-3.2GF, channels-last", "regnet_y_3_2gf", 64, channels_last=True),
        of(
            "EfficientNet-B0, channels-last", "efficientnet_b0", 128, {**whole, "stochastic_depth_prob": 0.0},
            channels_last=True,
        ),
        of("DenseNet-121, channels-last", "densenet121", 64, channels_last=True),
        of("MobileNetV3-L, channels-last", "mobilenet_v3_large", 128, whole, channels_last=True),
    ]  # fmt: skip


def _transformers() -> list[ModelCase]:
    def of(name: str, config: str, precision: Precision, **options: Any) -> ModelCase:
        build = partial(LanguageModel, config, vocab_size=VOCABULARY, **options)
        return ModelCase(name, build, text_batch(8, 1024, VOCABULARY), precision=precision, rate=1e-3)

    return [
        of(
            "Llama, 8 layers", "LlamaConfig", "bfloat16", hidden_size=1024, intermediate_size=2816,
            num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=8, max_position_embeddings=2048,
        ),
        of(
            "OPT, 8 layers", "OPTConfig", "autocast", hidden_size=1024, ffn_dim=4096, num_hidden_layers=8,
            num_attention_heads=16, word_embed_proj_dim=1024, dropout=0.0, max_position_embeddings=2048,
        ),
    ]  # fmt: skip
