"""Models of torchvision and transformers as these give them, each with the loss that it is trained with.

The packages are imported when a model is built: only those who measure one need them.
"""

# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Classifier(nn.Module):
    """A model of torchvision by its name, and what else it takes."""

    def __init__(self, name: str, classes: int = 1000, **options: Any) -> None:
        super().__init__()
        from torchvision.models import get_model

        self.net: nn.Module = get_model(name, num_classes=classes, **options)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.net(images), targets)


class LanguageModel(nn.Module):
    """A decoder of transformers: ``config`` is the name of its class of configurations, ``options`` what it takes."""

    def __init__(self, config: str, **options: Any) -> None:
        super().__init__()
        import transformers

        made = getattr(transformers, config)(use_cache=False, attn_implementation="sdpa", **options)
        self.net: nn.Module = transformers.AutoModelForCausalLM.from_config(made)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.net(tokens).logits
        return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
