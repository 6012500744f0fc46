"""pipeline_streams: what walks an axis that is parallel on ``stream`` is done chunk by chunk.

before (T0 was split in two along its rows, the outer part parallelised on ``stream``)::

    inputs: T0[i0, i1/8@mesh_x i1%8]:Float, T1[i2, i1/8@mesh_x i1%8]:Float
    T2p[mesh_x_of_T2@mesh_x, i0, i2]:Float = linear(T0, T1, partial=1)
    T2[i0, i2]:Float = sum(T2p, axes=(0,), mesh=mesh_x)
    outputs: T2

after::

    inputs: T0[i0, i1/8@mesh_x i1%8]:Float, T1[i2, i1/8@mesh_x i1%8]:Float
    T0c0[i0%4, i1/8@mesh_x i1%8]:Float = stream_slice(T0, stream=(i0/4,), chunk=0)
    T0c1[i0%4, i1/8@mesh_x i1%8]:Float = stream_slice(T0, stream=(i0/4,), chunk=1)
    T2pc0[mesh_x_of_T2@mesh_x, i0%4, i2]:Float = linear(T0c0, T1, partial=1, chunk=0)
    T2pc1[mesh_x_of_T2@mesh_x, i0%4, i2]:Float = linear(T0c1, T1, partial=1, chunk=1)
    T2c0[i0%4, i2]:Float = sum(T2pc0, axes=(0,), mesh=mesh_x, chunk=0)
    T2c1[i0%4, i2]:Float = sum(T2pc1, axes=(0,), mesh=mesh_x, chunk=1)
    T2[i0, i2]:Float = stream_cat(T2c0, T2c1, stream=(i0/4,))
    outputs: T2

From the tensor that was told so, chunks reach forward and backward through every Expr that does for one chunk what it
does for all; what an Expr of another kind reads is put together before.  A gather of pieces that are the chunks
themselves is a broadcast from each rank.  Exprs of different chunks never share a segment, so that one chunk's
collective runs beside the kernels of the next.

A swizzled stream has each rank begin with the chunk that has its own index on a mesh dimension.  Over that dimension
ranks then have different chunks at one stage: a gather of the chunks is a slice of what the rank has and, for each
other stage, one send around the ring; any other collective over it reads what was put together.
"""

from __future__ import annotations

from dataclasses import replace

from ..analysis.communication_table import Collective, communication_of, mesh_dims_of
from ..analysis.sharding import allowed, carries, is_even, is_opaque, is_untouched, stand_together, walked_axes
from ..ir.call import Call
from ..ir.digits import Axis, extent, root_of
from ..ir.domain import without
from ..ir.expr import BoundFusion, BoundTensor, Expr, Value
from ..ir.op import Iota, Move, Random, Reshard, StreamCat, StreamSlice
from ..ir.stream import Stream
from ..mesh import ParallelType
from ..ops.evaluate import place_in


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
        self.stream_of: dict[Expr, Stream] = {}
        self.exprs: list[Expr] = []
        self.pieces: dict[tuple[BoundTensor, Stream], list[BoundTensor]] = {}
        self.names = dict.fromkeys(t.name for t in fusion.tensors())

    def run(self) -> None:
        for tensor, stream in sorted(self.fusion.streams, key=lambda s: s[1].swizzle is None):
            self.spread(tensor, stream)
        for expr in self.fusion.exprs:
            if expr in self.stream_of:
                self.cut(expr, self.stream_of[expr])
                continue
            for t in expr.tensors:
                self.put_together(t)
            self.exprs.append(expr)
        for t in self.fusion.outputs:
            self.put_together(t)
        self.fusion.exprs = self.exprs

    # which Exprs

    def spread(self, tensor: BoundTensor, stream: Stream) -> None:
        todo = [tensor]
        seen = dict.fromkeys(todo)
        while todo:
            t = todo.pop()
            maker = self.producer.get(t)
            for expr in [*([maker] if maker is not None else []), *self.readers.get(t, [])]:
                if expr in self.stream_of or not _goes_by_chunks(expr, stream):
                    continue
                self.stream_of[expr] = stream
                for other in (*expr.tensors, *expr.outputs):
                    if other not in seen and _holds(other, stream.digits):
                        seen[other] = None
                        todo.append(other)

    # chunks

    def cut(self, expr: Expr, stream: Stream) -> None:
        inputs = [self.in_chunks(v, stream, expr) for v in expr.inputs]
        made = [self.chunks_of(t, stream.digits) for t in expr.outputs]
        gathers = _is_gather(expr, stream.digits)
        for i in range(stream.chunks):
            outputs = tuple(chunks[i] for chunks in made)
            if gathers and i == 0 and _is_ring(expr, stream):
                self.slice(expr.tensors[0], outputs[0], stream, i)
                continue
            op = replace(expr.op, stream=stream) if gathers and isinstance(expr.op, Reshard) else expr.op
            read = tuple(chunks[i] for chunks in inputs)
            self.exprs.append(replace(expr, op=op, inputs=read, outputs=outputs, chunk=i))
        for t, chunks in zip(expr.outputs, made, strict=True):
            self.pieces[t, stream] = chunks

    def slice(self, tensor: BoundTensor, chunk: BoundTensor, stream: Stream, stage: int) -> None:
        self.exprs.append(Expr(StreamSlice(stream), (tensor,), (chunk,), chunk=stage))

    def in_chunks(self, value: Value, stream: Stream, expr: Expr) -> list[Value]:
        """``value`` as each stage of ``expr`` reads it."""
        if not isinstance(value, BoundTensor):
            return [value] * stream.chunks
        if not _holds(value, stream.digits):
            self.put_together(value)
            return [value] * stream.chunks
        if (value, stream) not in self.pieces:
            self.put_together(value)
            self.pieces[value, stream] = chunks = self.chunks_of(value, stream.digits)
            for i, chunk in enumerate(chunks):
                self.slice(value, chunk, stream, i)
        return list(self.pieces[value, stream])

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
        if maker is None or maker not in self.stream_of:
            return
        stream = self.stream_of[maker]
        self.exprs.append(Expr(StreamCat(stream), tuple(self.pieces[tensor, stream]), (tensor,)))
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


def _goes_by_chunks(expr: Expr, stream: Stream) -> bool:
    """Is what ``expr`` makes of one chunk a chunk of what it makes?"""
    digits = stream.digits
    if is_opaque(expr) or isinstance(expr.op, Move | Iota | Random):
        return False
    if isinstance(expr.op, Call) and not allowed(expr, ((ParallelType.stream, digits),)):
        return False
    if not all(_holds(t, digits) for t in expr.outputs):
        return False
    if not _have_one_chunk(expr, stream):
        return _is_gather(expr, digits) and _is_ring(expr, stream)
    if _is_gather(expr, digits):
        return True
    return all(
        (_holds(t, digits) and carries(axes, digits)) or is_untouched(t.domain.logical, digits)
        for t, axes in zip(expr.tensors, walked_axes(expr), strict=True)
    )


def _have_one_chunk(expr: Expr, stream: Stream) -> bool:
    """Do ranks that communicate in ``expr`` all take the same chunk at each stage?"""
    found = communication_of(expr)
    if found is None or found.is_free or stream.swizzle is None:
        return True
    return expr.output.domain.mesh == stream.swizzle.mesh and stream.swizzle.parallel_type not in found.mesh_dims


def _is_gather(expr: Expr, digits: Axis) -> bool:
    """Does it gather from each rank what is a chunk?"""
    found = communication_of(expr)
    if found is None or found.kind is not Collective.ALL_GATHER or found.mesh_dim is None:
        return False
    return expr.tensors[0].domain.digits_on(found.mesh_dim) == digits


def _is_ring(expr: Expr, stream: Stream) -> bool:
    """Does it communicate over the mesh dimension whose ranks each begin with a chunk of their own?"""
    swizzle = stream.swizzle
    return (
        swizzle is not None
        and mesh_dims_of(expr) == (swizzle.parallel_type,)
        and expr.output.domain.mesh == swizzle.mesh
    )
