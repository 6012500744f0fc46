"""``python -m shardfuse doctor``: what this machine and this installation have, and whether it works."""

from .report import run_doctor

__all__ = ["run_doctor"]
