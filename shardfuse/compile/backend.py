# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""``torch.compile(model, backend="shardfuse")``: Inductor, with passes set for this compilation alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, get_args

import torch
from torch.fx import GraphModule

from ..base_error import ArgumentError
from ..errors import PromiseError
from ..frontend.promise_arguments import promised
from .compile_errors import CompileOptionError, UnknownOptionError

OPTIONS = ("shardfuse.take",)


def backend(
    graph: GraphModule,
    example_inputs: Sequence[torch.Tensor],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable[..., Any]:
    """Compile ``graph`` by Inductor, with shardfuse's kernels where they are expected to gain.

    ``mode`` and ``options`` are torch.compile's for Inductor; ``options={"shardfuse.take": ...}`` says which regions
    are handed over: "auto", "all" or "none".  ``shardfuse.invariant`` and ``shardfuse.accumulate`` are refused, where
    they promise something: Inductor's kernels promise nothing.  Raises ``CompileOptionError``, ``UnknownOptionError``,
    ``DefinitionError`` and ``PromiseError``.
    """
    from torch._inductor.compile_fx import compile_fx

    return cast("Callable[..., Any]", compile_fx(graph, list(example_inputs), config_patches=patches(mode, options)))


def _check_promises(invariant: Any, accumulate: Any) -> None:
    """A promise holds for every kernel of a graph, and most of them are Inductor's."""
    said = promised('backend="shardfuse"', invariant, accumulate)
    if said.arguments:
        found = "a compiled graph has kernels of Inductor's, and its products, which follow the sizes of a call"
        remedy = (
            "promise it of the modules, which are ops of the graph then: shardfuse.nn.convert(model), and "
            f"shardfuse.nn.promise(model, {said})"
        )
        raise PromiseError(str(said), found, remedy)


def patches(mode: str | None, options: Mapping[str, object] | None) -> dict[str, Any]:
    """Inductor's configuration for one compilation: the mode's, the options', and passes behind the caller's own."""
    from torch._inductor import config, list_mode_options

    from shardfuse.compile.graph_pass import JointGraphPass, PostGradPass, Take

    if not isinstance(cast(object, options), Mapping | None):
        raise ArgumentError("torch.compile", "options", options, "a dict of options and their values")
    given = {**(list_mode_options(mode) if mode and mode != "default" else {}), **(options or {})}
    take = given.pop("shardfuse.take", "auto")
    _check_promises(given.pop("shardfuse.invariant", None), given.pop("shardfuse.accumulate", None))
    if take not in get_args(Take):
        raise CompileOptionError("shardfuse.take", take, get_args(Take))
    unknown = next((k for k in given if "shardfuse" in str(k) or f"shardfuse.{k}" in OPTIONS), None)
    if unknown is not None:
        raise UnknownOptionError(unknown, OPTIONS)
    found = {k.replace("-", "_"): v for k, v in given.items()}
    for name, kind in (("post_grad_custom_post_pass", PostGradPass), ("joint_custom_post_pass", JointGraphPass)):
        own: Any = found.get(name, getattr(config, name))
        before = cast("Sequence[Any]", own if isinstance(own, list | tuple) else [own])  # a list in later torch
        found[name] = kind(cast(Take, take), [p for p in before if p is not None])
    return found
