"""pipeline_streams: what walks an axis that is parallel on ``stream`` is done chunk by chunk.

before (T0 was split in two along its rows, the outer part parallelised on ``stream``)::

    inputs: T0[i0, i1/8@mesh_x i1%8]:Float, T1[i2, i1/8@mesh_x i1%8]:Float
    T2p[mesh_x_of_T2@mesh_x, i0, i2]:Float = linear(T0, T1, partial=1)
    T2[i0, i2]:Float = sum(T2p, axes=(0,), mesh=mesh_x)
    outputs: T2

after::

    inputs: T0[i0, i1/8@mesh_x i1%8]:Float, T1[i2, i1/8@mesh_x i1%8]:Float
    T0c0[i0%4, i1/8@mesh_x i1%8]:Float = stream_slice(T0, digits=(i0/4,), chunk=0)
    T0c1[i0%4, i1/8@mesh_x i1%8]:Float = stream_slice(T0, digits=(i0/4,), chunk=1)
    T2pc0[mesh_x_of_T2@mesh_x, i0%4, i2]:Float = linear(T0c0, T1, partial=1, chunk=0)
    T2pc1[mesh_x_of_T2@mesh_x, i0%4, i2]:Float = linear(T0c1, T1, partial=1, chunk=1)
    T2c0[i0%4, i2]:Float = sum(T2pc0, axes=(0,), mesh=mesh_x, chunk=0)
    T2c1[i0%4, i2]:Float = sum(T2pc1, axes=(0,), mesh=mesh_x, chunk=1)
    T2[i0, i2]:Float = stream_cat(T2c0, T2c1, digits=(i0/4,))
    outputs: T2

From the tensor that was told so, chunks reach forward and backward through every Expr that does for one chunk what it
does for all; what an Expr of another kind reads is put together before.  A gather of pieces that are the chunks
themselves is a broadcast from each rank.  Exprs of different chunks never share a segment, so that one chunk's
collective runs beside the kernels of the next.
"""

from __future__ import annotations

from dataclasses import replace

from ..analysis.resharding import communication_of
from ..analysis.sharding import allowed, is_even, is_opaque, is_untouched, stand_together
from ..ir.digits import Axis, extent, root_of
from ..ir.domain import without
from ..ir.expr import FACTORIES, BoundFusion, BoundTensor, Expr, Value
from ..mesh import ParallelType
from ..ops.evaluate import place_in
from ..ops.torch_calls import TORCH_CALLS


def pipeline_streams(fusion: BoundFusion) -> None:
    if fusion.streams:
        _Pipeline(fusion).run()


class _Pipeline:
    def __init__(self, fusion: BoundFusion) -> None:
        self.fusion = fusion
        self.producer = fusion.producer_of()
        self.readers: dict[BoundTensor, list[Expr]] = {}
        for expr in fusion.exprs:
            for t in dict.fromkeys(expr.tensors):
                self.readers.setdefault(t, []).append(expr)
        self.digits_of: dict[Expr, Axis] = {}
        self.exprs: list[Expr] = []
        self.pieces: dict[tuple[BoundTensor, Axis], list[BoundTensor]] = {}
        self.names = dict.fromkeys(t.name for t in fusion.tensors())

    def run(self) -> None:
        for tensor, digits in self.fusion.streams:
            self.spread(tensor, digits)
        for expr in self.fusion.exprs:
            if expr in self.digits_of:
                self.cut(expr, self.digits_of[expr])
                continue
            for t in expr.tensors:
                self.put_together(t)
            self.exprs.append(expr)
        for t in self.fusion.outputs:
            self.put_together(t)
        self.fusion.exprs = self.exprs

    # which Exprs

    def spread(self, tensor: BoundTensor, digits: Axis) -> None:
        todo = [tensor]
        seen = dict.fromkeys(todo)
        while todo:
            t = todo.pop()
            maker = self.producer.get(t)
            for expr in [*([maker] if maker is not None else []), *self.readers.get(t, [])]:
                if expr in self.digits_of or not _goes_by_chunks(expr, digits):
                    continue
                self.digits_of[expr] = digits
                for other in (*expr.tensors, *expr.outputs):
                    if other not in seen and _holds(other, digits):
                        seen[other] = None
                        todo.append(other)

    # chunks

    def cut(self, expr: Expr, digits: Axis) -> None:
        inputs = [self.in_chunks(v, digits, expr) for v in expr.inputs]
        made = [self.chunks_of(t, digits) for t in expr.outputs]
        for i in range(extent(digits)):
            attributes = {**expr.attributes, "chunk": i}
            if _is_broadcast(expr, digits):
                attributes["root"] = i
            outputs = tuple(chunks[i] for chunks in made)
            self.exprs.append(Expr(expr.op, tuple(chunks[i] for chunks in inputs), outputs, attributes))
        for t, chunks in zip(expr.outputs, made, strict=True):
            self.pieces[t, digits] = chunks

    def in_chunks(self, value: Value, digits: Axis, expr: Expr) -> list[Value]:
        """``value`` as each chunk of ``expr`` reads it."""
        count = extent(digits)
        if not isinstance(value, BoundTensor):
            return [value] * count
        if not _holds(value, digits):
            self.put_together(value)
            return [value] * count
        if (value, digits) not in self.pieces:
            self.put_together(value)
            self.pieces[value, digits] = chunks = self.chunks_of(value, digits)
            for i, chunk in enumerate(chunks):
                self.exprs.append(Expr("stream_slice", (value,), (chunk,), {"digits": digits, "chunk": i}))
        return list(self.pieces[value, digits])

    def chunks_of(self, tensor: BoundTensor, digits: Axis) -> list[BoundTensor]:
        logical = tuple(without(axis, digits) for axis in tensor.domain.logical)
        domain = replace(tensor.domain, logical=logical, allocation=None)
        return [BoundTensor(self.name(f"{tensor.name}c{i}"), tensor.dtype, domain) for i in range(extent(digits))]

    def name(self, wanted: str) -> str:
        while wanted in self.names:
            wanted += "x"
        self.names[wanted] = None
        return wanted

    def put_together(self, tensor: BoundTensor) -> None:
        """Make ``tensor`` of its chunks, where it is made in chunks and was not put together yet."""
        maker = self.producer.get(tensor)
        if maker is None or maker not in self.digits_of:
            return
        digits = self.digits_of[maker]
        self.exprs.append(Expr("stream_cat", tuple(self.pieces[tensor, digits]), (tensor,), {"digits": digits}))
        del self.producer[tensor]


def _holds(tensor: BoundTensor, digits: Axis) -> bool:
    """Has each rank all chunks of ``tensor``, of one size?"""
    domain = tensor.domain
    if all(place_in(axis, digits) is None for axis in domain.local_axes()):
        return False
    roots = [root_of(d) for d in digits]
    return stand_together([*(own for _, own in domain.sharding), digits]) and not any(
        root_of(own[0]) in roots and (domain.mesh is None or not is_even(own, domain.mesh.extent(p)))
        for p, own in domain.sharding
    )


def _goes_by_chunks(expr: Expr, digits: Axis) -> bool:
    """Is what ``expr`` makes of one chunk a chunk of what it makes?"""
    if is_opaque(expr) or "move" in expr.attributes or (expr.op in FACTORIES and expr.op != "full"):
        return False
    if expr.op in TORCH_CALLS and not allowed(expr, ((ParallelType.stream, digits),)):
        return False
    if not all(_holds(t, digits) for t in expr.outputs):
        return False
    if _is_broadcast(expr, digits):
        return True
    return all(_holds(t, digits) or is_untouched(t.domain.logical, digits) for t in expr.tensors)


def _is_broadcast(expr: Expr, digits: Axis) -> bool:
    """Does it gather from each rank what is a chunk?"""
    found = communication_of(expr)
    if found is None or found.kind != "all_gather" or found.mesh_dim is None:
        return False
    return expr.tensors[0].domain.digits_on(found.mesh_dim) == digits
