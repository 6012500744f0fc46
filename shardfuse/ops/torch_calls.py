"""Ops that a library does better than generated code: one torch call each."""

from __future__ import annotations

from .attention_calls import ATTENTION_CALLS
from .call_signature import Signature, TorchCall
from .index_calls import INDEX_CALLS
from .matmul_calls import MATMUL_CALLS
from .scan_calls import SCAN_CALLS
from .shape_calls import SHAPE_CALLS

TORCH_CALLS: dict[str, TorchCall] = {**MATMUL_CALLS, **ATTENTION_CALLS, **SHAPE_CALLS, **INDEX_CALLS, **SCAN_CALLS}

__all__ = ["TORCH_CALLS", "Signature", "TorchCall"]
