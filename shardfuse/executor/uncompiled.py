# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportAttributeAccessIssue=false, reportUnknownArgumentType=false
"""Functions that torch.compile calls as they are, with what they call, and does not trace.

A run of a fusion is nothing that torch could compile once more, and tracing shardfuse's own tables takes long and
fails.  This is ``torch.compiler.disable`` without the import of torch._dynamo, which takes longer than a first run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from torch._C._dynamo import eval_frame

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, at which torch.compile breaks its graph."""
    marked = cast(Any, function)
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "a fusion of shardfuse is compiled already"
    skip = eval_frame._FrameAction.SKIP  # the function, and all that it calls
    eval_frame.set_code_exec_strategy(marked.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function
