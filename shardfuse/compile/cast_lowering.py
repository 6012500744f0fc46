# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportMissingParameterType=false, reportUnknownParameterType=false
"""What Inductor writes for a list of casts: one call of an object of the generated module, see ``cast_call.py``.

before, as for any op that Inductor does not know::

    buf3 = torch.ops.shardfuse.cast_list_v1.default([primals_1, primals_2], torch.bfloat16)

after::

    buf3 = casts_0f3a.run(primals_1, primals_2)
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any, cast

from torch._inductor import ir
from torch._inductor.virtualized import V

from .cast_op import CASTS
from .region_lowering import declare, is_python, lower_as

_IMPORT = "from shardfuse.compile.cast_call import CastCall as shardfuse_casts"


class CastKernel(ir.FallbackKernel):
    """The op, but for the text that stands for it in Python, and the memory of results that are views of one tensor:
    what Inductor stored over one of them would hold all of it."""

    @classmethod
    def create(cls, kernel: Any, *arguments: Any, **options: Any) -> Any:
        outputs: Any = super().create(kernel, *arguments, **options)
        if _is_joined(outputs[0].inputs[0]):
            V.graph.never_reuse_buffers.update(output.get_name() for output in outputs)
        return outputs

    def codegen(self, wrapper: Any) -> None:
        if is_python(wrapper):
            _write_call(self, wrapper)
            return
        super().codegen(wrapper)


@functools.cache
def register() -> None:
    """Have Inductor lower the op so, in this process."""
    lower_as(CASTS, CastKernel)


def _is_joined(node: Any) -> bool:
    """Are all tensors of the list inputs of the graph?  Gradients, which are not, become the user's, one by one."""
    return all(x.get_name() in V.graph.graph_inputs for x in node.inputs)


def _write_call(node: CastKernel, wrapper: Any) -> None:
    inputs = cast("Sequence[Any]", node.inputs)
    (dtype,) = cast("Sequence[Any]", node.constant_args)
    layouts = [(tuple(map(int, x.get_size())), tuple(map(int, x.get_stride()))) for x in inputs]
    given = [(x.get_dtype(), x.get_device()) for x in inputs]
    is_joined = _is_joined(node)
    name = f"casts_{hashlib.sha256(repr((dtype, layouts, is_joined, given)).encode()).hexdigest()[:12]}"
    declare(wrapper, _IMPORT, f"{name} = shardfuse_casts({dtype!r}, {layouts!r}, {is_joined!r})")
    node.codegen_comment(wrapper)
    wrapper.writeline(f"{node.get_name()} = {name}.run({', '.join(x.codegen_reference() for x in inputs)})")
