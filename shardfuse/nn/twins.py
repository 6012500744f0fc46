"""Modules that have a twin: the same, but for something that fusions depend on and tensors' metadata does not show.

That the channels of an image come last in memory, say, or that a mask has a gradient.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, ClassVar, Self

import torch

from .fused import FusedModule


class TwinnedModule(FusedModule):
    """``twin_flag``: the attribute that is True of twins alone, and stands in the text of their settings."""

    twin_flag: ClassVar[str] = ""
    twin_text: str
    """The settings of the twin, printed."""
    _twins: dict[tuple[tuple[str, Hashable], ...], FusedModule]
    """By the settings that are changed, none or some."""

    def describe(self) -> None:
        self.__dict__["_twins"] = {}
        super().describe()
        self.__dict__["twin_text"] = self.text.replace("{", f'{{"{self.twin_flag}":true,', 1)
        if getattr(self, self.twin_flag):
            self.__dict__["text"] = self.twin_text

    @classmethod
    def made_again(cls, settings: Mapping[str, Any]) -> Self:
        made = super().made_again({name: value for name, value in settings.items() if name != cls.twin_flag})
        if cls.twin_flag in settings:
            made.__dict__[cls.twin_flag] = True
            made.describe()
        return made

    def twin(self, **changed: Hashable) -> FusedModule:
        """Kept until a setting is another one; past ``torch.nn.Module.__setattr__``, as it is no child.

        changed: settings of which the twin has these values.
        """
        key = tuple(changed.items())
        made = self._twins.get(key)
        if made is None:
            with torch.no_grad():
                made = self.defined.made_again({**self.settings(), **changed, self.twin_flag: True})
            made.timer, made.promises = self.timer, self.promises
            self._twins[key] = made
        return made

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_twins": {}}
