"""The suite ``modules``: every module and function of ``shardfuse.nn`` that computes on one GPU, beside torch's.

``UNTIMED`` has the other public names, each with the reason; a test holds both to the package's own lists.
"""

from __future__ import annotations

from ..called import Called
from . import module_losses, module_norms, module_quantized, module_units

UNTIMED = {
    "Conversion": "what convert() returns",
    "FusionTimer": "a clock",
    "Redistribution": "moves between ranks: the suite reshard",
    "SyncBatchNorm": "BatchNorm2d, over several ranks",
    "bucket_gradients": "sums over ranks",
    "convert": "replaces modules, and computes nothing",
    "functional": "the functions, each by its own name",
    "promise": "changes modules, and computes nothing: the suite promises",
    "quantized": "the functions, each by its own name",
    "quantized.Quantized": "what the functions return",
    "redistribute": "moves between ranks: the suite reshard",
}
"""Public names of ``shardfuse.nn`` that this suite does not time."""

MODULES: dict[str, Called] = {
    w.name: w
    for w in (
        *module_norms.WORKLOADS,
        *module_units.WORKLOADS,
        *module_losses.WORKLOADS,
        *module_quantized.WORKLOADS,
    )
}
