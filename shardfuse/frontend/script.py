"""A definition as Python that runs and rebuilds it: ops, mesh, shardings and allocation domains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

from ..ir.domain import IterDomain, Merge
from ..ir.dtype import DataType
from ..ir.expr import Number, Scalar
from ..ir.fusion import Fusion, FusionInput, Record
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
    if record.op in ("rng_seed", "rng_offset"):
        return []
    names = ", ".join(out.name for out in record.outputs)
    roles = record.attributes.get("roles")
    op = "truediv" if record.op == "div" else record.op
    values = [_text(v) for v in record.inputs]
    if isinstance(roles, tuple):
        named = zip(cast(tuple[str, ...], roles), values, strict=True)
        values = [f"{role}={value}" for role, value in named if role not in DRAWN]
    arguments = _ARGUMENTS.get(record.op, _plain)(record, values)
    return [f"{names} = fd.ops.{op}({', '.join(arguments)})"]


Arguments = Callable[[Record, list[str]], list[str]]


def _plain(record: Record, values: list[str]) -> list[str]:
    """The inputs, then every attribute by position."""
    return [*values, *(_text(v) for v in record.attributes.values())]


def _with(*keywords: str) -> Arguments:
    """The inputs, then attributes under the keywords ``attribute=keyword``; those that are ``None`` are left out."""
    pairs = [word.split(":") for word in keywords]

    def arguments(record: Record, values: list[str]) -> list[str]:
        given = record.attributes
        return [*values, *(f"{p[-1]}={_text(given[p[0]])}" for p in pairs if given.get(p[0]) is not None)]

    return arguments


def _dtype(record: Record) -> str:
    out = record.outputs[0]
    return f"dtype={out.dtype!r}"


def _full(record: Record, values: list[str]) -> list[str]:
    return [f"shape={_text(record.attributes['shape'])}", f"fill_value={values[0]}", _dtype(record)]


def _iota(record: Record, values: list[str]) -> list[str]:
    given = record.attributes
    (length,) = cast(tuple[object, ...], given["shape"])
    return [_text(length), *(f"{k}={_text(given[k])}" for k in ("start", "step")), _dtype(record)]


def _draw(record: Record, values: list[str]) -> list[str]:
    low, high, seed, offset = values
    key = [f"rng_seed={seed}", f"rng_offset={offset}"] if not record.attributes.get("drawn") else []
    return [low, high, f"shape={_text(record.attributes['shape'])}", *key, _dtype(record)]


def _pad(record: Record, values: list[str]) -> list[str]:
    """Widths in pairs, the last axis first."""
    widths = cast(tuple[object, ...], record.attributes["widths"])
    pairs = [widths[k : k + 2] for k in range(0, len(widths), 2)]
    flat = tuple(n for pair in reversed(pairs) for n in pair)
    return [values[0], f"pad_widths={_text(flat)}", f"value={values[1]}"]


def _with_dtype(record: Record, values: list[str]) -> list[str]:
    return [values[0], f"dims={_text(record.attributes['axes'])}", _dtype(record)]


def _cat(record: Record, values: list[str]) -> list[str]:
    return [f"[{', '.join(values)}]", f"dim={_text(record.attributes['dim'])}"]


_ARGUMENTS: dict[str, Arguments] = {
    "cast": lambda record, values: [values[0], f"dtype={record.attributes['dtype']!r}"],
    "broadcast": _with("new:is_broadcast_dim"),
    "broadcast_in_dim": _with("shape", "dims:broadcast_dims"),
    "expand": _with("shape"),
    "squeeze": _with("axes:dims"),
    "permute": _with("dims"),
    "reshape": _with("shape:new_shape"),
    "size": _with("dims:dim"),
    "linear": lambda record, values: [*values[:2], *(f"bias={v}" for v in values[2:])],
    "sum": _with_dtype,
    "prod": _with_dtype,
    **{op: _with("axes:dims") for op in ("max", "min", "any", "all")},
    "full": _full,
    "iota": _iota,
    "uniform": _draw,
    "normal": _draw,
    "pad": _pad,
    "cat": _cat,
    "slice": _with("starts:start_indices", "stops:end_indices", "steps:strides"),
    "flip": _with("dims"),
    **{
        op: _with("dim")
        for op in ("select", "index_select", "gather", "take_along_axis", "scatter", "cumsum", "cumprod")
    },
    **{op: _with("dim") for op in ("cummax", "cummin", "argmax", "argmin")},
    "argsort": _with("dim", "descending", "stable"),
    "topk": _with("k", "dim", "largest", "sorted"),
    "embedding": _with("padding_idx", "max_norm", "norm_type"),
    "grouped_mm": lambda record, values: values,
    "scaled_grouped_mm": lambda record, values: [*values, _dtype(record)],
    "block_scaled_mm": lambda record, values: [*values, _dtype(record)],
    "sdpfa_fwd": lambda record, values: values,
    "sdpfa_bwd": lambda record, values: [*values, *_absent(record)],
}


def _absent(record: Record) -> list[str]:
    roles = cast(tuple[str, ...], record.attributes["roles"])
    return [f"{role}=None" for role in ("dropout_p", "is_causal", "scale") if role not in roles]


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
    text = f"float({str(value)!r})" if isinstance(value, float) and not math.isfinite(value) else repr(value)
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
