"""Loads, values and stores of one kernel, as lines of text, each emitted where it is first needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from ..ir.dtype import DataType
from ..ir.expr import BoundTensor, Expr
from ..ir.layout import Coordinates
from ..ir.op import Cast, Full, Iota, Pick, Random, Reduce, Set, Statistic, View
from ..ir.scalar import Scalar
from ..ops.promotion import types
from ..ops.table import POINTWISE, Rule
from ..schedulers.plan import KernelPlan
from ..segments.rounding import is_rounded_apart, may_be_rough
from .accumulators import Accumulator, accumulator
from .arithmetic import LIBDEVICE, TRITON_TYPE, atom, converted, must_round, own_functions, pointwise_form
from .draw import beside_a_load, draw, function_of, run_of
from .loads import hint, in_few, shared_load
from .numbers import Numbers
from .row_blocks import first_of_blocks, in_blocks, spread
from .source import BLOCK, PROGRAM, MemoryAccess, Text
from .statements import Statement, Writer
from .tile import R_SIZE, Chunk, Layouts, Piece, Tile


class Emitter(Numbers):
    """Writes one kernel's body for one rank."""

    def __init__(
        self, plan: KernelPlan, layouts: Layouts, coordinates: Coordinates, *, interpret: bool, program: str = PROGRAM
    ) -> None:
        super().__init__(plan, Tile(plan, layouts, coordinates), interpret=interpret)
        self.program = program
        self.out = Writer()
        self.producer = {t: e for t, e in plan.segment.maker.items() if t not in plan.segment.windows}
        self.values: dict[tuple[BoundTensor, str], Text] = {}
        self.starts: dict[str, int] = {}

    @property
    def body(self) -> list[Statement]:
        """All that was written."""
        return [*self.head.statements, "", *self.out.statements]

    # what is needed

    def reductions(self, phase: int) -> list[Expr]:
        """The reductions that end ``phase``."""
        return [e for e in self.plan.segment.exprs if self.is_reduction(e) and self.space.phase[e.output] == phase + 1]

    def is_reduction(self, expr: Expr) -> bool:
        """Reductions over no local atom (a visible mesh axis, extents of 1) are copies."""
        reduces = isinstance(expr.op, Reduce | Statistic)
        return reduces and self.space.has_r(expr.tensors[0]) and not self.space.has_r(expr.output)

    def needed(self, wanted: Iterable[BoundTensor], chunk: Chunk) -> list[BoundTensor]:
        """What ``wanted`` rests on and has no value yet, inputs first; reductions are not looked behind."""
        found: dict[BoundTensor, None] = {}
        todo = [(t, False) for t in reversed(list(wanted))]
        while todo:  # not by recursion, for which a chain may be too long
            tensor, is_next = todo.pop()
            if is_next:
                found[tensor] = None
            elif tensor not in found and self.key(tensor, chunk) not in self.values:
                expr = self.producer.get(tensor)
                read = expr.tensors if expr is not None and not self.is_reduction(expr) else ()
                read = [t for t in read if not self.is_beside_blocks(t, expr)]
                own = read[1:2] if expr is not None and isinstance(expr.op, Pick) else read
                todo += [(tensor, True), *((t, False) for t in reversed(own))]
        return list(found)

    def key(self, tensor: BoundTensor, chunk: Chunk) -> tuple[BoundTensor, str]:
        by_piece = chunk.piece.suffix if self.space.has_x(tensor) else ""
        return tensor, chunk.suffix if self.space.has_r(tensor) else by_piece

    # values

    def load_needed(self, wanted: Iterable[BoundTensor], chunk: Chunk) -> None:
        """Loads first, so that all of them are under way before the first is used."""
        for tensor in sorted((t for t in self.needed(wanted, chunk) if t not in self.producer), key=self.space.has_r):
            self.value(tensor, chunk)

    def value(self, tensor: BoundTensor, chunk: Chunk) -> Text:
        """The value of ``tensor`` in ``chunk``; emits what it takes to have it."""
        key = self.key(tensor, chunk)
        if key not in self.values:
            whole = self.values.get((tensor, chunk.suffix.removesuffix("_b"))) if chunk.of_blocks else None
            if whole is not None and not whole.has_r:
                return whole
            for t in self.needed([tensor], chunk)[:-1]:
                self.value(t, chunk)
            expr = self.producer.get(tensor)
            self.values[key] = self.load(tensor, chunk) if expr is None else self.compute(expr, tensor, chunk)
        return self.values[key]

    def make(self, wanted: Sequence[BoundTensor], chunk: Chunk) -> None:
        """The values of ``wanted`` in ``chunk``, behind the loads that they take."""
        self.load_needed(wanted, chunk)
        for tensor in wanted:
            self.value(tensor, chunk)

    def name(self, tensor: BoundTensor, chunk: Chunk) -> str:
        return f"{tensor}{self.key(tensor, chunk)[1]}"

    def assign(
        self, name: str, text: str, dtype: DataType, has_x: bool, has_r: bool, *, of_blocks: bool = False
    ) -> Text:
        if self.interpret and dtype is DataType.Bool and text != name and not (has_x or has_r):
            text = f"libdevice.int1({text})"
        if "libdevice." in text:
            self.helpers["libdevice"] = LIBDEVICE[self.interpret]
        if text != name:
            self.out.line(f"{name} = {text}")
        return Text(name, dtype, has_x, has_r, of_blocks)

    def load(self, tensor: BoundTensor, chunk: Chunk) -> Text:
        window, dtype = self.tile.windows.get(tensor), tensor.dtype.compute
        inside = window.conditions(partial(self.index_text, chunk), partial(self.tile.part, chunk)) if window else []
        inside = [] if self.is_before_ends else inside
        if inside is None:
            return Text(f"tl.full([], 0, {TRITON_TYPE[dtype]})", dtype, False, False)
        if inside:
            self.out.line(f"in_{self.name(tensor, chunk)} = {' & '.join(inside)}")
            inside = [f"in_{self.name(tensor, chunk)}"]
        if window:
            pointer, has_x, has_r = self.elsewhere(tensor, window, chunk)
        else:
            terms, has_x, has_r = self.place(tensor, chunk)
            pointer = " + ".join([f"{tensor}_ptr", *in_few(self.tile, tensor, chunk, terms)])
        options = self.mask(has_x, has_r, chunk, inside)
        is_plain = has_r and not (window or chunk.of_blocks)
        shared = shared_load(self.tile, tensor, chunk, self.offset) if is_plain else None
        pointer, options = (self.pointer(tensor, shared.few)[0], shared.options) if shared else (pointer, options)
        is_broadcast = has_r and not has_x and self.tile.x_lanes and self.space.is_inner
        if is_broadcast and not (self.tile.is_row_wide or chunk.of_blocks):
            # One row for all rows of the tile: each warp reads it, instead of handing it round through shared memory.
            pointer = f"tl.broadcast_to({pointer}, {self.tile.shape_of(chunk)})"
        options += hint(self.plan, tensor, is_later=self.program == BLOCK)
        text = converted(self.load_text(self.source_of(tensor), pointer, options), tensor.dtype, dtype)
        text = shared.spread(text) if shared else text
        has_x &= self.tile.x_lanes
        return self.assign(self.name(tensor, chunk), text, dtype, has_x, has_r, of_blocks=chunk.of_blocks and has_r)

    def compute(self, expr: Expr, tensor: BoundTensor, chunk: Chunk) -> Text:
        assert not self.is_reduction(expr), f"{expr.output} is read before it is reduced"
        op = expr.op
        if isinstance(op, Iota):
            return self.iota(expr, op, chunk)
        if isinstance(op, Full):
            return self.full(expr, chunk)
        if isinstance(op, Random):
            return self.draw(expr, op, chunk)
        if isinstance(op, Pick):
            return self.pick(expr, chunk)[expr.outputs.index(tensor)]
        inputs = self.inputs_of(expr, chunk)
        if isinstance(op, View | Set) or (tensor in self.saturated and not isinstance(op, Cast)):
            return inputs[0]
        if isinstance(op, Reduce) and tensor in self.space.of_blocks and expr.tensors[0] not in self.space.of_blocks:
            return self.of_each_block(expr, inputs[0], chunk)
        has_x, has_r = any(v.has_x for v in inputs), any(v.has_r for v in inputs)
        if isinstance(op, Cast):
            text, dtype, inexact = self.cast(expr, inputs[0])
        elif isinstance(op, Reduce):
            acc, result = accumulator(expr), expr.output.dtype
            text, dtype = acc.finished(acc.prepared(inputs[0].text, inputs[0].dtype), result.compute), result.compute
            inexact = result.is_low_precision and result is not expr.tensors[0].dtype
        else:
            texts, dtypes = self.operands(expr, inputs)
            last = inputs[-1] if isinstance(expr.inputs[-1], BoundTensor) else None
            own = last is not None and (last.has_x, last.has_r) == (has_x, has_r) and not self.is_spread(expr)
            rough, once = may_be_rough(self.plan.segment, expr), is_rounded_apart(self.plan.segment, expr)
            form, texts, dtype = pointwise_form(expr, texts, dtypes, is_precise=own, is_rough=rough, is_rounded=once)
            form, functions = own_functions(form, dtype, interpret=self.interpret)
            if POINTWISE[op.name].rule is Rule.DRAW:
                texts[-1], function = beside_a_load(texts[-1], self.loaded(chunk), (has_x, has_r))
                self.use(function)
            self.use(*functions)
            text = form.format(*texts)
            inexact = must_round(expr)
        if inexact:
            text = self.rounded(text, expr.output)
        if inputs and text == inputs[0].text:
            return inputs[0]
        return self.assign(
            self.name(tensor, chunk), text, dtype, has_x, has_r, of_blocks=any(v.of_blocks for v in inputs)
        )

    def loaded(self, chunk: Chunk) -> list[Text]:
        """What ``chunk`` has been loaded of so far in runs along its lanes, the narrowest first."""
        loads = sorted(filter(self.tile.lane_runs, self.plan.segment.loads), key=lambda t: t.dtype.itemsize)
        return [self.values[key] for t in loads if (key := self.key(t, chunk)) in self.values]

    def inputs_of(self, expr: Expr, chunk: Chunk) -> list[Text]:
        """What ``expr`` reads; what has one number for each block as one for each element, where the output has."""
        if expr.output in self.space.of_blocks:
            first = partial(first_of_blocks, self.tile, chunk, self.offset)
            return [self.value(t, first() if self.is_beside_blocks(t, expr) else chunk) for t in expr.tensors]
        found = [self.value(t, chunk) for t in expr.tensors]
        if chunk.of_blocks:
            return found
        for k, (tensor, value) in enumerate(zip(expr.tensors, found, strict=True)):
            if value.of_blocks:
                key, name = (tensor, f"{chunk.suffix}_spread"), f"{self.name(tensor, chunk)}_spread"
                if key not in self.values:
                    text = spread(self.tile, chunk, value.text)
                    self.values[key] = self.assign(name, text, value.dtype, self.tile.x_lanes, True)
                found[k] = self.values[key]
        return found

    def is_beside_blocks(self, tensor: BoundTensor, reader: Expr | None) -> bool:
        """Does ``reader``, which makes one number for each block, read one that no block is reduced to?"""
        blocks = self.space.of_blocks
        if reader is None or reader.output not in blocks or tensor in blocks:
            return False
        return self.space.has_r(tensor) and self.space.atoms[tensor].isdisjoint(self.space.block)

    def is_spread(self, expr: Expr) -> bool:
        """Has the last tensor that ``expr`` reads one number for several elements that it makes?"""
        return expr.tensors[-1] in self.space.of_blocks and expr.output not in self.space.of_blocks

    def of_each_block(self, expr: Expr, value: Text, chunk: Chunk) -> Text:
        """A reduction of each block of a row: of lanes of the tile, no element of which is part of two blocks."""
        acc, out = accumulator(expr), expr.output
        self.use(acc.helper)
        text = acc.prepared(value.text, value.dtype)
        if not value.has_r or value.has_x != self.tile.x_lanes:
            text = f"tl.broadcast_to({text}, {self.tile.shape_of(chunk)})"
        text = self.finished(out, acc, acc.reduced(in_blocks(self.tile, chunk, text), 1 + self.tile.x_lanes))
        return self.assign(self.name(out, chunk), text, out.dtype.compute, self.tile.x_lanes, True, of_blocks=True)

    def pick(self, expr: Expr, chunk: Chunk) -> tuple[Text, Text]:
        """One element of each row, and whether there is one: loaded and computed by itself."""
        (x, at, *counting), (one, hit) = expr.tensors, expr.outputs
        index = self.value(at, chunk)
        for whole in counting:
            _, self.starts[f"start_{whole}"] = self.tile.index_strides(self.producer[whole])
            index = self.assign(f"{hit}_index", f"{index.text} - start_{whole}", DataType.Int, index.has_x, False)
        below = f"{index.text} < {self.tile.r_total}" if self.schedule.is_held else f"{R_SIZE} > {index.text}"
        text = f"({index.text} >= 0) & ({below})"
        self.values[hit, ""] = found = self.assign(str(hit), text, DataType.Bool, index.has_x, False)
        alone = Chunk(f"_at_{at}", None, 1, True, 1, found.text, index=index.text)
        self.load_needed([x], alone)
        self.values[one, ""] = picked = replace(self.value(x, alone), has_r=False)
        return picked, found

    def cast(self, expr: Expr, source: Text) -> tuple[str, DataType, bool]:
        wanted = expr.output.dtype
        if wanted is DataType.Bool and source.dtype is not DataType.Bool:
            return f"{source.text} != 0", wanted, False
        inexact = wanted.is_low_precision and wanted is not expr.tensors[0].dtype
        return converted(source.text, source.dtype, wanted.compute), wanted.compute, inexact

    def operands(self, expr: Expr, inputs: list[Text]) -> tuple[list[str], list[DataType]]:
        """Texts and types of the op's operands, numbers among them."""
        op = POINTWISE[expr.op.name]
        compute, _ = types(op, expr.inputs)
        remaining, found = iter(inputs), list[tuple[str, DataType]]()
        for k, v in enumerate(expr.inputs):
            if isinstance(v, Scalar):
                found.append(self.scalar(v, DataType.Bool if op.rule is Rule.WHERE and k == 0 else compute))
            else:
                source = next(remaining)
                # Without lanes the interpreter's `.to(tl.int1)` leaves a number as it is.
                is_alone = self.interpret and compute is DataType.Bool and not (source.has_x or source.has_r)
                found.append((f"libdevice.int1({source.text})", compute) if is_alone else (source.text, source.dtype))
        return [text for text, _ in found], [dtype for _, dtype in found]

    def full(self, expr: Expr, chunk: Chunk) -> Text:
        value, dtype = cast(Scalar, expr.inputs[0]), expr.output.dtype.compute
        text = converted(*self.scalar(value, dtype), dtype)
        if value.is_literal and not text.startswith(("tl.full", "denormal")):
            text = f"tl.full([], {text}, {TRITON_TYPE[dtype]})"
        return self.assign(self.name(expr.output, chunk), self.rounded(text, expr.output), dtype, False, False)

    def index(self, expr: Expr, chunk: Chunk, dtype: DataType = DataType.Int) -> tuple[str, bool, bool]:
        """The row-major index of ``expr``'s output, unsharded, and whether it has lanes along x and along r."""
        strides, start = self.tile.index_strides(expr)
        terms, has_x, has_r = self.terms(strides, chunk)
        if expr.output.domain.mesh_digits:
            self.starts[f"start_{expr.output}"] = start
            terms.insert(0, f"start_{expr.output}")
        elif not (has_x or has_r) or (self.interpret and not (self.tile.x_lanes or has_r)):
            # Triton's interpreter has the variable of a loop as Python's own number
            terms = [f"tl.full([], {' + '.join(terms) or 0}, tl.int64)"]
        return f"{atom(' + '.join(terms))}.to({TRITON_TYPE[dtype]})", has_x and self.tile.x_lanes, has_r

    def iota(self, expr: Expr, op: Iota, chunk: Chunk) -> Text:
        dtype = expr.output.dtype.compute
        wide = DataType.Int32 if dtype is DataType.Int32 else DataType.Int
        index, has_x, has_r = self.index(expr, chunk, wide)
        first, step = op.counting
        text = index if step == 1 else f"{index} * {step}"
        text = self.rounded(converted(text if first == 0 else f"{text} + {first}", wide, dtype), expr.output)
        return self.assign(self.name(expr.output, chunk), text, dtype, has_x, has_r)

    def draw(self, expr: Expr, op: Random, chunk: Chunk) -> Text:
        out, run, few = expr.output, run_of(self.tile, expr, chunk), chunk
        if run > 1:
            few = chunk.few(self.offset(f"{self.tile.lanes(chunk.block // run, reduced=True)} * {run}"))
        index, has_x, has_r = self.index(expr, few)
        kinds = (out.dtype.compute, out.dtype.compute, DataType.Int, DataType.Int)
        numbers = [converted(*self.scalar(cast(Scalar, v), t), t) for v, t in zip(expr.inputs, kinds, strict=True)]
        name, shape = self.name(out, chunk), self.tile.shape_of(chunk)
        steps = draw(expr, op.name, name, index, numbers, interpret=self.interpret, run=run, shape=shape)
        self.use(function_of(op.name, out.dtype, run))
        self.use_rounding(out.dtype)
        return [self.assign(name, text, out.dtype.compute, has_x, has_r) for name, text in steps][-1]

    def store(self, tensor: BoundTensor, chunk: Chunk) -> None:
        value = self.value(tensor, chunk)
        if value.of_blocks:
            chunk = first_of_blocks(self.tile, chunk, self.offset)
        pointer, has_x, has_r = self.pointer(tensor, chunk)
        if value.of_blocks and not has_r:  # the only block of the tile
            pointer, has_r = f"{pointer} + {chunk.lane}", True
        if self.space.grouped and value.has_x and not has_x:  # one place for all columns, which are of one group
            pointer, has_x = f"{pointer} + {chunk.piece.lane} * 0", True
        text = self.stored_text(value.text, tensor)
        if value.of_blocks and self.schedule.members and value.dtype is tensor.dtype is DataType.Float:
            self.use("store_by_all")
            there = " & ".join(f"{m}.to(tl.int32)" for m in self.masks(has_x, has_r, chunk)) or "1"
            self.accesses.append(MemoryAccess("store", tensor, pointer))
            self.out.line(f"store_by_all({pointer}, {text}, {there})")
            return
        mask = self.mask(has_x, has_r, chunk)
        if self.schedule.members and not has_r:
            mask = f"{mask} & (member == 0)" if mask else ", mask=member == 0"
        self.out.line(self.store_line(tensor, pointer, text, mask))

    # reductions

    def combine(self, expr: Expr, value: Text, chunk: Chunk) -> str:
        """One chunk's contribution, masked lanes neutral."""
        acc = accumulator(expr)
        if value.of_blocks and chunk.is_masked:
            chunk = first_of_blocks(self.tile, chunk, self.offset)
        text, is_whole = acc.prepared(value.text, value.dtype), value.has_r or chunk.is_masked
        if not is_whole or (self.tile.is_row_wide and not value.has_x):
            text = f"tl.broadcast_to({text}, {self.tile.shape_of(chunk)})"
        return chunk.where(text, acc.neutral) if chunk.is_masked else text

    def across_lanes(self, name: str, acc: Accumulator, blocks: Sequence[str]) -> list[str]:
        """What was accumulated, a block for each piece, reduced along r, and over the columns of each group."""
        reduced = [acc.reduced(text, self.tile.r_axis) for text in blocks]
        if not self.space.grouped:
            return reduced
        parts: list[str] = []
        for piece, text in zip(self.tile.pieces, reduced, strict=True):
            column = f"{name}_column{piece.suffix}"
            self.out.line(f"{column} = {text}")
            parts.append(acc.reduced(f"tl.where({piece.groups}, {column}[None, :], {acc.neutral})", 1))
        return parts

    def along_columns(self, name: str, acc: Accumulator, text: str) -> list[str]:
        """A value for each group, given to each of its columns: for each piece of them."""
        if not self.space.grouped:
            return [text]
        self.out.line(f"{name}_group = {text}")
        zero = "0.0" if acc.dtype.is_floating else "0"
        return [f"tl.sum(tl.where({p.groups}, {name}_group[:, None], {zero}), axis=0)" for p in self.tile.pieces]

    def finished(self, out: BoundTensor, acc: Accumulator, reduced: str) -> str:
        """The text of what was accumulated as a value of ``out``."""
        text = acc.finished(reduced, out.dtype.compute)
        return text if acc.is_exact else self.rounded(text, out)

    def give(self, out: BoundTensor, acc: Accumulator, reduced: str, pieces: Sequence[Piece] = ()) -> None:
        """The value of a reduction from the text of what was accumulated, of all ``pieces`` or of these."""
        for piece, text in zip(pieces or self.tile.pieces, self.along_columns(str(out), acc, reduced), strict=True):
            text = self.finished(out, acc, self.tile.expanded(text))
            suffix = piece.suffix if self.space.has_x(out) else ""
            self.values[out, suffix] = self.assign(f"{out}{suffix}", text, out.dtype.compute, self.tile.x_lanes, False)
