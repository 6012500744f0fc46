"""A definition as Python that runs and rebuilds it: ops, mesh, shardings and allocation domains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from ..ir.call import Call, Cat, Pad, WithRoles
from ..ir.domain import IterDomain, Merge
from ..ir.dtype import DataType
from ..ir.fusion import Fusion, FusionInput, Record
from ..ir.op import Cast, Full, Iota, Pointwise, Random, Reduce, RngOffset, RngSeed
from ..ir.scalar import Number, Scalar, number_text
from ..ir.tensor_view import TensorView
from ..ops.call_signature import DRAWN


def definition_script(fusion: Fusion) -> str:
    """``def nvfuser_fusion(fd)``, which records the same fusion in ``fd``."""
    lines = [f"fd.promise({fusion.promises})"] if fusion.promises.arguments else []
    lines += [_input_line(i) for i in fusion.inputs]
    for record in fusion.records:
        lines += _record_lines(record)
    for tv in fusion.tensors():
        lines += _schedule_lines(tv)
    for tv in fusion.outputs:
        alias = f", alias_input={fusion.aliases[tv].name}" if tv in fusion.aliases else ""
        lines.append(f"fd.add_output({tv.name}{alias}{', allocation_rank=True' if tv.allocation_rank else ''})")
    return "def nvfuser_fusion(fd : FusionDefinition) -> None :\n" + "".join(f"    {line}\n" for line in lines)


def _input_line(declared: FusionInput) -> str:
    val = declared.val
    if isinstance(val, Scalar):
        return f"{val.name} = fd.define_scalar(dtype={val.dtype!r})"
    extra = f", stride_order={list(declared.stride_order)}" if declared.stride_order else ""
    extra += ", allocation_rank=True" if val.allocation_rank else ""
    contiguity = f"contiguity={list(declared.contiguity)}, " if declared.contiguity else ""
    said = f"shape={list(val.shape)}, {contiguity}dtype={val.dtype!r}, is_cpu={val.is_cpu}{extra}"
    return f"{val.name} = fd.define_tensor({said})"


def _record_lines(record: Record) -> list[str]:
    """One line; none for seeds that are drawn, which the random op draws anew."""
    if isinstance(record.op, RngSeed | RngOffset):
        return []
    names = ", ".join(out.name for out in record.outputs)
    name = "truediv" if record.op == Pointwise("div") else record.op.name
    return [f"{names} = fd.ops.{name}({', '.join(_arguments(record))})"]


def _arguments(record: Record) -> list[str]:
    """The inputs and what the op is told, by the names that builders have for it."""
    op, values, dtype = record.op, [_text(v) for v in record.inputs], f"dtype={record.outputs[0].dtype!r}"
    match op:
        case Cast(said):
            return [*values, f"dtype={said!r}"]
        case Reduce():
            return [*values, f"dims={_text(op.axes)}", *([dtype] if op.kind in ("sum", "prod") else [])]
        case Full(shape):
            return [f"shape={_text(shape)}", f"fill_value={values[0]}", dtype]
        case Iota((length,)):
            return [_text(length), f"start={_text(op.start)}", f"step={_text(op.step)}", dtype]
        case Random():
            low, high, seed, offset = values
            key = [] if op.drawn else [f"rng_seed={seed}", f"rng_offset={offset}"]
            return [low, high, f"shape={_text(op.shape)}", *key, dtype]
        case WithRoles():
            return _with_roles(op, values, dtype)
        case Pad():
            pairs = [op.widths[k : k + 2] for k in range(0, len(op.widths), 2)]  # the last axis first
            return [values[0], f"pad_widths={_text([n for p in reversed(pairs) for n in p])}", f"value={values[1]}"]
        case Cat():
            return [f"[{', '.join(values)}]", f"dim={op.dim}"]
        case Call("linear"):
            return [*values[:2], *(f"bias={v}" for v in values[2:])]
        case _:
            told = [(f"{_KEYWORDS.get((op.name, k), k)}={_text(v)}", v) for k, v in op.arguments()]
            return [*values, *(text for text, v in told if v is not None)]


_KEYWORDS = {
    ("broadcast", "new"): "is_broadcast_dim",
    ("squeeze", "axes"): "dims",
    ("reshape", "shape"): "new_shape",
    ("size", "dims"): "dim",
    ("slice", "starts"): "start_indices",
    ("slice", "stops"): "end_indices",
    ("slice", "steps"): "strides",
}
"""Of an op, parameters of its builder that have other names than its fields."""


def _with_roles(op: WithRoles, values: Sequence[str], dtype: str) -> list[str]:
    """Every input under its keyword; what was left out where the builder has no default for it."""
    named = [f"{role}={value}" for role, value in zip(op.roles, values, strict=True) if role not in DRAWN]
    if op.name == "sdpfa_bwd":
        return [*named, *(f"{role}=None" for role in ("dropout_p", "is_causal", "scale") if role not in op.roles)]
    return [*named, dtype] if op.name in ("scaled_grouped_mm", "block_scaled_mm") else named


def _text(value: object) -> str:
    match value:
        case tuple() | list():
            return f"[{', '.join(_text(v) for v in cast(Sequence[object], value))}]"
        case Scalar(is_literal=True, dtype=dtype, value=number) if number is not None:
            return _number_text(number, dtype)
        case Scalar():
            return value.name
        case TensorView():
            return value.name
        case float():
            return _number_text(value, DataType.Double)
        case _:
            return repr(value)


def _number_text(value: Number, dtype: DataType) -> str:
    """The number itself where Python's own type says its dtype, else a defined scalar."""
    text = number_text(value)
    own = {bool: DataType.Bool, int: DataType.Int, float: DataType.Double, complex: DataType.ComplexDouble}[type(value)]
    return text if own is dtype else f"fd.define_scalar({text}, dtype={dtype!r})"


def _schedule_lines(tv: TensorView) -> list[str]:
    domain = tv.domain
    lines: list[str] = []
    if domain.mesh is not None:
        lines.append(f"{tv.name}.set_device_mesh({domain.mesh!r})")
    loop = list(domain.logical)
    for place, axis in domain.reduced:
        loop.insert(place, axis)
    handles = [axis for axis in domain.allocation or () if axis not in (*domain.loop, *domain.logical)]
    for t in domain.transforms:
        cut = [a for a in handles if a in loop and a in (t.axes if isinstance(t, Merge) else (t.axis,))]
        lines += [f"{_handle(tv, handles, axis)} = {tv.name}.axis({loop.index(axis)})" for axis in cut]
        if isinstance(t, Merge):
            a, b = (loop.index(i) for i in t.axes)
            lines.append(f"{tv.name}.merge({a}, {b})")
            loop[a] = t.out
            loop.pop(b)
        else:
            at = loop.index(t.axis)
            lines.append(f"{tv.name}.split({at}, {t.factor}, inner_split={t.inner}, uneven={t.uneven})")
            loop[at : at + 1] = t.out
    order = [loop.index(i) for i in domain.loop]
    if order != list(range(len(loop))):
        lines.append(f"{tv.name}.reorder({order})")
    for k, axis in enumerate(domain.loop):
        if axis in domain.parallel:
            lines.append(f"{tv.name}.axis({k}).parallelize(ParallelType.{domain.parallel[axis].name})")
        if axis in domain.swizzles:
            lines.append(f"{tv.name}.swizzle1d({k}, ParallelType.{domain.swizzles[axis].name})")
    if domain.allocation is not None:
        where = ", ".join(
            _handle(tv, handles, axis) if axis in handles else _axis_expr(tv, axis) for axis in domain.allocation
        )
        lines.append(f"{tv.name}.set_allocation_domain([{where}], {list(domain.contiguity)})")
    return lines


def _handle(tv: TensorView, handles: Sequence[IterDomain], axis: IterDomain) -> str:
    """The name of an allocation axis that later splits and merges took apart."""
    return f"{tv.name}_axis{handles.index(axis)}"


def _axis_expr(tv: TensorView, axis: IterDomain) -> str:
    if axis in tv.domain.loop:
        return f"{tv.name}.get_loop_domain()[{tv.domain.loop.index(axis)}]"
    return f"{tv.name}.get_logical_domain()[{tv.domain.logical.index(axis)}]"
