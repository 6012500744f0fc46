"""A definition as Python that runs and rebuilds it: ops, mesh, shardings and allocation domains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..ir.domain import IterDomain, Merge
from ..ir.expr import Scalar
from ..ir.fusion import Fusion, FusionInput, Record
from ..ir.tensor_view import TensorView


def definition_script(fusion: Fusion) -> str:
    """``def nvfuser_fusion(fd)``, which records the same fusion in ``fd``."""
    lines = [_input_line(i) for i in fusion.inputs]
    literal: dict[Scalar, None] = {}
    for record in fusion.records:
        for v in record.inputs:
            if isinstance(v, Scalar) and v.is_literal and v not in literal:
                literal[v] = None
                lines.append(f"{v.name} = fd.define_scalar({v.value!r}, dtype={v.dtype!r})")
        lines.append(_record_line(record))
    for tv in fusion.tensors():
        lines += _schedule_lines(tv)
    lines += [f"fd.add_output({tv.name}{', allocation_rank=True' if tv.allocation_rank else ''})" for tv in fusion.outputs]
    return "def nvfuser_fusion(fd):\n" + "".join(f"    {line}\n" for line in lines)


def _input_line(declared: FusionInput) -> str:
    val = declared.val
    if isinstance(val, Scalar):
        return f"{val.name} = fd.define_scalar(dtype={val.dtype!r})"
    extra = f", is_cpu={val.is_cpu}" if val.is_cpu else ""
    extra += f", stride_order={list(declared.stride_order)}" if declared.stride_order else ""
    extra += ", allocation_rank=True" if val.allocation_rank else ""
    contiguity = list(declared.contiguity) if declared.contiguity else None
    return f"{val.name} = fd.define_tensor({list(val.shape)}, contiguity={contiguity}, dtype={val.dtype!r}{extra})"


def _record_line(record: Record) -> str:
    out = record.outputs[0]
    names = [v.name for v in record.inputs]
    if record.op == "full":
        names.insert(0, _text(record.attributes["shape"]))
    arguments = ", ".join([*names, *_arguments(record, record.attributes)])
    return f"{out.name} = fd.ops.{record.op}({arguments})"


def _arguments(record: Record, attributes: Mapping[str, object]) -> list[str]:
    match record.op:
        case "size":
            return [_text(attributes["dims"])]
        case "broadcast":
            return [_text(attributes["new"])]
        case "cast":
            return [f"dtype={attributes['dtype']!r}"]
        case "sum" | "prod":
            out = record.outputs[0]
            return [_text(attributes["axes"]), f"dtype={out.dtype!r}"]
        case "full":
            return [f"dtype={record.outputs[0].dtype!r}"]
        case "iota":
            (length,) = attributes["shape"] if isinstance(attributes["shape"], tuple) else (0,)
            return [_text(length), _text(attributes["start"]), _text(attributes["step"]), f"dtype={record.outputs[0].dtype!r}"]
        case _:
            return [_text(v) for v in attributes.values()]


def _text(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(_text(v) for v in value)}]"
    if isinstance(value, Scalar):
        return value.name
    return repr(value)


def _schedule_lines(tv: TensorView) -> list[str]:
    domain = tv.domain
    lines: list[str] = []
    if domain.mesh is not None:
        lines.append(f"{tv.name}.set_device_mesh({domain.mesh!r})")
    loop = list(domain.logical)
    handles = [axis for axis in domain.allocation or () if axis not in (*domain.loop, *domain.logical)]
    for t in domain.transforms:
        for axis in (a for a in handles if a in loop and a in (t.axes if isinstance(t, Merge) else (t.axis,))):
            lines.append(f"{_handle(tv, handles, axis)} = {tv.name}.axis({loop.index(axis)})")
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

