# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""torch.compile with shardfuse's kernels: ``torch.compile(model, backend="shardfuse")``.

Inductor compiles the model; a pass behind autograd hands norms, softmax, losses and other reductions, with the
pointwise ops around them, over to shardfuse where that is expected to gain.  ``report()`` tells what was done.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from .backend import backend
from .ledger import RegionReport, Report
from .reporting import report

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    from .graph_pass import Take

__all__ = ["RegionReport", "Report", "backend", "post_grad_pass", "report"]


def post_grad_pass(take: Take = "auto") -> CustomGraphPass:
    """The pass alone, for ``torch._inductor.config.post_grad_custom_post_pass``.

    ``take``: which regions are handed over, "auto", "all" or "none".  Raises ``CompileOptionError``.
    """
    from shardfuse.compile.graph_pass import PostGradPass

    return PostGradPass(take)


def _register() -> None:
    """By name, where no entry point of an installed package has done so."""
    if not entry_points(group="torch_dynamo_backends", name="shardfuse"):
        from torch._dynamo import register_backend

        register_backend(backend, name="shardfuse")


_register()
