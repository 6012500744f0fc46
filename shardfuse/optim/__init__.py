"""Optimiser steps over many tensors: gradient norm, clipping and AdamW in three kernels and one collective."""

from .adamw import AdamW
from .clip import clip_grad_norm_, get_total_norm

__all__ = ["AdamW", "clip_grad_norm_", "get_total_norm"]
