"""Generated kernels compiled for sm_90 without a GPU: no spill, and loads as wide as the rows are aligned."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from math import prod
from pathlib import Path

import pytest
import torch
from kernel_cases import BF16, GOLDEN, SM90, rms_norm, softmax, swiglu
from segments import Builder, kernels_of

from shardfuse import FusionDefinition
from shardfuse.codegen import KernelSource, generate
from shardfuse.device import H200
from shardfuse.ir.digits import extent
from shardfuse.ir.dtype import DataType
from shardfuse.ir.op import Broadcast
from shardfuse.ops.builder import INTEGERS_ONLY
from shardfuse.ops.table import POINTWISE, Rule
from shardfuse.schedulers import persistent
from shardfuse.segments.segment import Segment

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.sm90 import Resources, compile_all, planned, sources_of
from benchmarks.workload import Case, Workload
from benchmarks.workloads import WORKLOADS

KERNELS = 200
"""At least so many, no two alike, are compiled."""
LARGE = 1 << 20
"""Bytes of a tensor below which the width of loads is no matter."""
QUICK = [
    *GOLDEN, "softmax 1000", "layer_norm 5140", "rms_norm 20480", "rms_norm 65536", "rms_norm_dw 5140",
    "rms_norm_dw double 1024", *(f"softmax of odd rows {n}" for n in (5139, 32001, 50257, 128257)),
    "layer_norm 49152", "layer_norm of very long rows", "layer_norm of few rows", "layer_norm of wide rows",
    "swiglu past 32 bits", "layer_norm_backward 5140", "layer_norm_backward beside a residual",
    "rms_norm_backward 384", "transpose_add",
    "gelu_tanh_backward",
]  # fmt: skip
LARGER_TILE = "a register: 63 us on an H200, with half a tile and no spill 66"
HALF_THE_PROGRAMS = "124 us on an H200; with half as many programs a multiprocessor and no spill 125"
NARROWER = "122 us on an H200; in tiles of half the columns, which spill as much, 171"
SPILLS: dict[str, tuple[int, str]] = {
    "layer_norm 49152": (12, "254 us of 4096 rows on an H200; with 96 registers and no spill 283"),
    "layer_norm 8192x16384:float32": (4, "301 us on an H200; left alone, without a spill, 357"),
    "rms_norm 1024x262144:float32": (32, "548 us on an H200; with 168 registers, three programs a multiprocessor 585"),
    "layer_norm_backward 16384x5140:bfloat16": (40, "169 us on an H200; one program a multiprocessor, without, 201"),
    "rms_norm_backward 384": (12, "27.9 us on an H200; in chunks of 128, without, 28.5"),
    "group_norm_channels_last 1x512x256x256:float16:channels_last": (16, LARGER_TILE),
    "batch_norm 32x256x56x56:float16": (12, "34.9 us on an H200; by words of two accesses, without, 34.4"),
    "batch_norm 64x64x112x112:float16": (12, "as many where every thread stores a word; by words of two accesses none"),
    "add_rms_norm 264x30144:float64": (8, "in loops, whose third stage does not fit"),
    "batch_norm_channels_last 32x256x56x56:float32:channels_last": (140, HALF_THE_PROGRAMS),
    "batch_norm_channels_last 8x64x256x256:float32:channels_last": (100, NARROWER),
    "batch_norm_backward_channels_last 32x256x56x56:float32:channels_last": (28, "of Triton 3.7 alone, not timed"),
}
"""Case: the bytes that its kernels spill, no more and no less, and why they do."""
IS_TRITON_3_6 = version("triton").startswith("3.6.")
if IS_TRITON_3_6:  # whose assembler allots registers otherwise
    SPILLS |= {
        "layer_norm 49152": (16, SPILLS["layer_norm 49152"][1]),
        "rms_norm_dw double 5139": (128, "of Triton 3.6 alone"),
        "group_norm_backward_channels_last 2x320x128x128:float16:channels_last": (32, "of Triton 3.6 alone"),
        "group_norm 1x512x17x96x96:bfloat16": (16, "of Triton 3.6 alone"),
        "batch_norm_channels_last 32x256x56x56:float16:channels_last": (8, "of Triton 3.6 alone"),
        "batch_norm_channels_last 96x144x56x56:bfloat16:channels_last": (8, "of Triton 3.6 alone"),
        "batch_norm_channels_last 32x256x56x56:float32:channels_last": (152, HALF_THE_PROGRAMS),
        "batch_norm_channels_last 8x64x256x256:float32:channels_last": (136, NARROWER),
    }
HALVES = "chunks of half a load, which divide the row and can be copied ahead: 0.94 of a copy in docs/measured.md"
SHARED_ROW = "two warps a row of three chunks: 10.9 us, with loads of 128 bits, a warp a row, 11.8"
NARROW: dict[str, tuple[int, str]] = {
    **{f"{name} 768": (64, SHARED_ROW) for name in ("layer_norm", "rms_norm", "add_rms_norm", "dropout_layer_norm")},
    "layer_norm 8192x768:float16": (64, SHARED_ROW),
    "rms_norm_backward 5120": (64, HALVES),
    "rms_norm_backward 16384x5120:bfloat16": (64, HALVES),
}
"""Case: the bits of its kernels' widest load, and why it is no wider."""

WORDS = ("ld.relaxed.gpu.global.b64", "st.relaxed.gpu.global.b64")
"""How programs that poll each other read and write a word: in one access, of which no half is seen alone."""

OTHER_SIZES = {
    "batch_norm": ("64x64x112x112:float16", "16x512x28x28:float16"),
    "batch_norm_channels_last": (
        *("64x64x112x112:float16:channels_last", "32x128x56x56:float16:channels_last"),
        "96x144x56x56:bfloat16:channels_last",
    ),
    "batch_norm_backward": ("64x64x112x112:float16", "16x512x28x28:float16", "64x2048x7x7:float16"),
    "group_norm": ("2x960x96x96:float16", "1x512x17x96x96:bfloat16"),
    "group_norm_backward_channels_last": ("4x320x64x64:float16:channels_last",),
}
"""Workload: cases that the benchmark does not have, whose rules were not made for one size."""
TIGHT = {"add_rms_norm": ("264x30144:float64",), "modulated_norms": ("8x1023x5120",)}
"""Loops whose three turns of copies do not fit; rows whose vectors differ within what could be a block of four."""


@dataclass(frozen=True)
class Compiled:
    """A kernel of a case."""

    case: str
    source: KernelSource
    resources: Resources

    def __str__(self) -> str:
        return f"{self.case}: {self.resources}, loads by bits {self.resources.loads}"

    @property
    def allowed_bits(self) -> int:
        """What every row of the largest tensor keeps aligned, at most 128."""
        largest = max(self.source.tensors, key=lambda t: prod(t.domain.local_shape(0)) * t.dtype.itemsize)
        if prod(largest.domain.local_shape(0)) * largest.dtype.itemsize < LARGE:
            return 0
        sides = [extent(axis) for axis in largest.domain.storage() if extent(axis) > 1]
        width = 16
        while sides[-1] * largest.dtype.itemsize % width:
            width //= 2
        return 8 * width


def compiled(cases: Iterable[tuple[str, KernelSource]]) -> list[Compiled]:
    listed = list(cases)
    made = compile_all([source for _, source in listed])
    return [Compiled(name, source, found) for (name, source), found in zip(listed, made, strict=True)]


def by_hand(names: Iterable[str]) -> Iterable[tuple[str, KernelSource]]:
    return ((name, source) for name in names for source in kernels_of(SM90[name]))


def public_grid() -> Iterable[tuple[str, KernelSource]]:
    """All cases of the benchmark, and in float32 the first of each workload and those that something is known of."""
    for workload in WORKLOADS.values():
        for k, case in enumerate(map(Case.parse, workload.cases)):
            for each in dict.fromkeys((case, replace(case, dtype=torch.float32))):
                name = f"{workload.name} {each}"
                if each == case or k == 0 or name in SPILLS or name in NARROW:
                    yield from ((name, source) for source in _planned(workload, each))


def sizes(listed: Mapping[str, Sequence[str]]) -> Iterable[tuple[str, KernelSource]]:
    for name, cases in listed.items():
        for case in cases:
            for source in _planned(WORKLOADS[name], Case.parse(case)):
                yield f"{name} {case}", source


def _planned(workload: Workload, case: Case) -> list[KernelSource]:
    return [source for _, source in planned(workload, case)]


def check(found: Iterable[Compiled]) -> None:
    """All that is wrong, at once."""
    wrong: list[str] = []
    for k in found:
        spills, bits = SPILLS.get(k.case, (0, ""))[0], NARROW.get(k.case, (k.allowed_bits, ""))[0]
        if k.resources.spills > spills or (k.resources.stack and not spills):
            wrong.append(f"spills {k}")
        if k.resources.widest_load < min(bits, k.allowed_bits):
            wrong.append(f"no load of {bits} bits {k}")
        if k.resources.shared > H200.shared_bytes:
            wrong.append(f"too much shared memory {k}")
    assert not wrong, "\n".join(wrong)


def test_representative_kernels() -> None:
    found = compiled(by_hand(QUICK))
    assert {k.case for k in found} == set(QUICK)
    check(found)
    by_case = {k.case: k.resources for k in found}
    # Whole rows, four chunks: everything by 128 bits, no barrier but those of one reduction.
    rows = by_case["rms_norm"]
    assert (rows.loads, rows.stores) == ({128: 8}, {128: 4})
    assert rows.registers <= 64
    # Rows that begin within a word.
    for columns in (5139, 32001, 50257, 128257):
        odd = by_case[f"softmax of odd rows {columns}"]
        assert (odd.widest_load, max(odd.stores)) == (128, 128), odd
    # What is compared keeps NaN; only what counts elements, in float32, may drop it.
    assert {name for name, found in by_case.items() if found.drops_nan} == {"group_norm_channels_last"}
    # Programs poll words of 64 bits; of a row, of pairs of rows, of columns.
    polled = {k.case for k in found if k.resources.relaxed}
    of_pairs, in_columns = "layer_norm of very long rows", "group_norm_channels_last"
    assert {"softmax of odd rows 128257", "rms_norm_backward_team", of_pairs, in_columns} <= polled
    assert {k.resources.relaxed for k in found if k.case in polled} == {WORDS}
    # A warp to a row: no barrier at all.
    assert by_case["softmax 1000"].barriers == 0
    # Two programs a multiprocessor.
    assert by_case["rms_norm 20480"].registers <= 64


def test_what_is_held_and_copied_ahead_fits() -> None:
    check(compiled(sizes(TIGHT)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kernel() -> None:
    found = compiled([*by_hand(SM90), *public_grid(), *sizes(OTHER_SIZES), *sizes(TIGHT)])
    assert len({(k.source.text, k.source.num_warps, k.source.num_stages) for k in found}) >= KERNELS
    check(found)
    assert {k.case for k in found} >= {*SPILLS, *NARROW}
    if IS_TRITON_3_6:  # what spills less there is not in the table
        return
    spilled = {case: max(k.resources.spills for k in found if k.case == case) for case in SPILLS}
    assert spilled == {case: most for case, (most, _) in SPILLS.items()}


def test_which_rows_are_read_from_the_beginning_of_a_word() -> None:
    """Odd rows of 16 bits, by a program or a team; what takes exponentials is read two rows ahead."""

    def proposed(build: Callable[..., Segment], *sizes: int) -> tuple[bool, bool, int]:
        schedule = persistent.propose(build(*sizes, BF16), H200)
        return schedule.is_aligned_down, schedule.is_packed, schedule.lag

    assert proposed(softmax, 8192, 50257) == proposed(rms_norm, 8192, 50257) == (True, True, 0)
    assert proposed(softmax, 8192, 2049) == (True, True, 0)
    assert proposed(softmax, 8192, 2041) == proposed(softmax, 8192, 4096) == (False, False, 0)
    assert proposed(softmax, 8192, 65536) == (False, True, 0)
    assert proposed(softmax, 2048, 128257) == (True, False, 1)
    assert proposed(softmax, 2048, 131072) == (False, False, 2)
    assert proposed(softmax, 2048, 128258) == (False, False, 2)
    assert proposed(rms_norm, 2048, 128258) == proposed(rms_norm, 2048, 128257) == (True, False, 1)
    assert proposed(rms_norm, 2048, 131072) == (False, False, 1)


@pytest.mark.parametrize("dtype", [DataType.Float, DataType.BFloat16])
def test_no_op_drops_nan(dtype: DataType) -> None:
    """No ``min.f32`` or ``max.f32`` without ``.NaN``; CUDA's atan2 has them, and looks for NaN itself."""
    with FusionDefinition() as fd:
        a, b, c, d = (fd.define_tensor([1024], contiguity=True, dtype=dtype) for _ in range(4))
        for name, op in POINTWISE.items():
            if op.triton is not None and name != "atan2" and name not in INTEGERS_ONLY:
                first = fd.ops.gt(a, b) if op.rule is Rule.WHERE else a
                fd.add_output(getattr(fd.ops, name)(*(first, b, c, d)[: op.arity]))
        for op in (fd.ops.amax, fd.ops.amin):
            fd.add_output(op(a, [0]))
    inputs = [torch.empty(1024, dtype=dtype.torch, device="meta") for _ in range(4)]
    sources = sources_of(fd.fec.plan(dict.fromkeys(fd.fec.tensors(), (1024,))), inputs)
    found = compile_all(sources)
    assert found
    assert [r.kernel for r in found if r.drops_nan] == []


def _difference(rows: int, columns: int, dtype: DataType, axis: int, form: str) -> Segment:
    """Of products and the largest of them, or what another kernel has found beside each row, or their mean."""
    b = Builder()
    i, j = b.axis(rows), b.axis(columns)
    y = b.op("mul", b.input(dtype, i, j), 0.5 if form == "a power of two" else 0.3)
    match form:
        case "another kernel's":
            other = b.emit(Broadcast((False, True)), [b.input(dtype, i)], dtype, [i, ()])
        case "mean":
            other = b.mean(y, [axis])
        case _:
            other = b.reduce("max", y, [axis])
    if form == "added":
        return b.segment(b.op("add", b.op("neg", y), other))
    return b.segment(b.op("sub", y, other))


def test_products_of_which_one_is_chosen_are_not_contracted() -> None:
    """The assembler contracts nothing either of what is told to be rounded; of a mean it is as before."""
    forms = ("largest", "added", "another kernel's")
    segments = [_difference(1024, 512, DataType.Float, 1, form) for form in forms]
    segments.append(_difference(1024, 512, DataType.Double, 1, "largest"))
    segments.append(_difference(4096, 4096, DataType.Float, 0, "largest"))
    contracted = [_difference(1024, 512, DataType.Float, 1, form) for form in ("mean", "a power of two")]
    kernels = [source for segment in [*segments, *contracted] for source in kernels_of(segment)]
    found = compile_all(kernels)
    apart = len(kernels) - len(contracted)
    assert [r.kernel for r in found[:apart] if r.contracted] == []
    assert all(r.contracted for r in found[apart:])


def test_functions_of_a_denormal_that_is_written_down() -> None:
    """LLVM sees no denormal of float32: it ends the process where it folds these functions of one."""
    sources: list[KernelSource] = []
    for dtype in (DataType.Float, DataType.BFloat16, DataType.Double):
        with FusionDefinition() as fd:
            x = fd.define_tensor([1024], contiguity=True, dtype=dtype)
            for number in (1e-40, -1e-45, 1e-310):
                fd.add_output(fd.ops.pow(number, x))
                fd.add_output(fd.ops.pow(x, number))
                full = fd.ops.full([1024], number, dtype)
                fd.add_output(fd.ops.add(x, fd.ops.add(fd.ops.tan(full), fd.ops.asin(full))))
        inputs = [torch.empty(1024, dtype=dtype.torch, device="meta")]
        sources += sources_of(fd.fec.plan(dict.fromkeys(fd.fec.tensors(), (1024,))), inputs)
    assert len(compile_all(sources)) == len(sources)
    assert "1e-310, tl.float64" in sources[-1].text


@pytest.mark.parametrize("last", [4095, 4094, 4092])
def test_a_flat_walk_of_a_number_that_no_load_divides(last: int) -> None:
    """Its last program alone has a mask, which splits loads."""
    (source,) = kernels_of(swiglu(8191, last, BF16))
    (found,) = compile_all([source])
    assert found.loads[128] >= 2
    assert found.stores[128] >= 1


def test_parts_of_64_bits_are_added_up_in_registers() -> None:
    sources: list[KernelSource] = []
    for dtype, wide in ((DataType.Int8, DataType.Int), (DataType.Double, DataType.Double)):
        b = Builder()
        x = b.cast(b.input(dtype, b.axis(20000), b.axis(301)), wide)
        sources += kernels_of(b.segment(b.reduce("sum", x, [0], keepdim=False)))
    found = compile_all(sources)
    assert [(r.spills, r.stack) for r in found] == [(0, 0), (0, 0)]


def test_a_late_team_on_a_rank_with_one_row() -> None:
    """Of rows that are cut unevenly: planned for many, and a loop of one turn compiles all the same."""
    schedule = persistent.propose(rms_norm(2048, 131072, BF16), H200)
    assert schedule.lag
    alone = rms_norm(1, 131072, BF16)
    (plan,) = persistent.kernels(alone, schedule, H200)
    source = generate(plan, {t: t.domain.layout(0) for t in (*alone.inputs, *alone.outputs)}, 0)
    assert source.grid == schedule.members
    (found,) = compile_all([source])
    assert found.registers <= schedule.launch.registers


def test_a_mask_that_is_stored_goes_through_no_shared_memory() -> None:
    """A thread draws the elements that it has loaded: no barrier more than where the mask is not stored."""
    sources: list[KernelSource] = []
    for stores in (False, True):
        with FusionDefinition() as fd:
            x = fd.define_tensor(shape=[8192, 1024], contiguity=True, dtype=DataType.BFloat16)
            seed = fd.define_tensor(shape=[], dtype=DataType.Int)
            places = fd.ops.reshape(fd.ops.iota(8192 * 1024, dtype=DataType.Int), [8192, 1024])
            kept = fd.ops.gt(fd.ops.philox_uniform(seed, places), 0.1)
            left = fd.ops.mul(fd.ops.cast(x, dtype=DataType.Float), fd.ops.cast(kept, dtype=DataType.Float))
            fd.add_output(fd.ops.sub(left, fd.ops.mean(left, [1], keepdim=True)))
            if stores:
                fd.add_output(kept)
        shapes = {x: (8192, 1024), seed: ()}
        inputs = [torch.empty(s, dtype=t.dtype.torch, device="meta") for t, s in shapes.items()]
        sources += sources_of(fd.fec.plan(shapes), inputs)
    without, stored = compile_all(sources)
    assert stored.barriers == without.barriers
    assert stored.shared == without.shared


def test_the_assembler_is_read_rightly() -> None:
    """A kernel that must spill is seen to."""
    (source,) = kernels_of(SM90["layer_norm 20480"])
    (tight,) = compile_all([replace(source, max_registers=32)])
    (free,) = compile_all([source])
    assert tight.registers <= 32
    assert tight.spills > 0
    assert tight.stack > 0
    assert (free.spills, free.stack) == (0, 0)
    assert "SPILLS" in str(tight)
