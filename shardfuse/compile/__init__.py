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

__all__ = ["RegionReport", "Report", "backend", "joint_graph_pass", "post_grad_pass", "report"]


def post_grad_pass(take: Take = "auto") -> CustomGraphPass:
    """The pass alone, for ``torch._inductor.config.post_grad_custom_post_pass``.

    ``take``: which regions are handed over, "auto", "all" or "none".  Raises ``CompileOptionError``.
    """
    from shardfuse.compile.graph_pass import PostGradPass

    return PostGradPass(take)


def joint_graph_pass(take: Take = "auto") -> CustomGraphPass:
    """What the backend changes before torch divides a graph into forward and backward, beside ``post_grad_pass``.

    It is for ``torch._inductor.config.joint_custom_post_pass``: gradients of a ReLU read the sign of the tensor that
    the ReLU reads.  ``take``: as there.  Raises ``CompileOptionError``.
    """
    from shardfuse.compile.graph_pass import JointGraphPass

    return JointGraphPass(take)


def _register() -> None:
    """By name, where no entry point of an installed package has done so."""
    if not entry_points(group="torch_dynamo_backends", name="shardfuse"):
        from torch._dynamo import register_backend

        register_backend(backend, name="shardfuse")


_register()
