"""Writes docs/ops.md from the tables of ops: every op, its types and how it runs.

python scripts/generate_docs.py           writes the page
python scripts/generate_docs.py --check   ends with exit code 1 if it is not what would be written
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path

from shardfuse.ops.build import ALIASES, Ops
from shardfuse.ops.builder import INTEGERS_ONLY
from shardfuse.ops.table import POINTWISE, PointwiseOp, Rule
from shardfuse.ops.torch_calls import TORCH_CALLS

PAGE = Path(__file__).parents[1] / "docs/ops.md"

HEAD = """# Ops

Written by `scripts/generate_docs.py` from the tables in `shardfuse/ops/`; do not edit.

Every operation of a fusion: `fd.ops.NAME(...)`. The tables of [pointwise ops](#pointwise) and of the others
come last, by kind; the sections before them say what holds for all ops.

**Operands** are TensorViews, scalars of the fusion and Python numbers, broadcast as numpy does.

**Types.** `P` is the type that torch promotes the operands to. Unsigned integers of 16 bits and more and 8-bit floats
are not promoted: cast them first. Narrow floats (16 and 8 bits) are computed in float32 and rounded to their own type,
once for each op: `mean`, `var`, `var_mean` and `welford` are one op each, sharded and unsharded, while a `sum` and a
`div` are two and round twice.

**How an op runs** is the last column of the tables:

| runs as | meaning |
|---|---|
| kernel | Fused with the ops around it. Of complex numbers any op is a torch call. |
| torch call | One call of torch, which is a segment of its own. |
| view | Nothing runs; the result shares the input's storage. |
| host | A number that the host computes. |

Where a torch call cannot be computed on shards of an axis (a scan along it, a slice of it), the axis is gathered first.

## Numbers

Python's and NumPy's scalars are operands, in the type that the op computes in:

| number | what happens |
|---|---|
| a float or an integer beyond a float type | infinite; in a type without infinities what torch's cast gives |
| a negative number in an unsigned type | wraps |
| any other integer that an integer type does not hold | `OperandError` |
| an integer of more than 64 bits | `OperandError`, `InputError` |
| what `iota` counts to | wraps |

`Float8_e4m3fn` and `Float8_e8m0fnu` have no infinities. torch's cast to the first gives its largest number, so that
`full_like(x, 1e9)` is 448 (NaN before torch 2.13), and an infinity in the second is NaN. What `max` and `min` take
for a rank that has no elements, infinite in other types, is the last of these types' numbers; of no elements at all
they are a `ShapeError`.

A constant is refused when the op is recorded; a scalar input, a size, and what is computed from them, in the call,
before anything is written. Under `torch.compile` all such integers wrap, as they do in eager torch.

## Indices

An index beyond its axis is an `IndexRangeError` on a CPU, with the op, the index, its value, what is allowed, and your
line. On a GPU the host does not read indices, because it would have to wait for them: there torch's kernel ends with a
`device-side assert`, after which CUDA takes no more calls. Run the program on a CPU to see which index it was.

`take_along_axis`, `index_put_accumulate` and `select` take negative indices, as torch does; the others do not.

## Which random numbers

An element's number follows from a seed and from its place in the unsharded tensor, in row-major order, so that it is
the same however the tensor is sharded. All are made by Philox 4x32-10.

- `uniform`, `normal` and `dropout` take a seed and an offset of the host, both or neither; without them, and for
  `rand_like` and `randn_like`, torch's generator of the device gives both, and is moved on in each call. On a mesh that
  is the first rank's. Element `i` of a `uniform` of 32 bits or fewer is of word `i % 4` of the key `rng_seed` and the
  counter `(i // 4, rng_offset)`, a `normal`'s, and a Double's, of the words of the counter `(i, rng_offset)`.
- `philox_uniform(seed, index)` takes seeds and indices that may be tensors: word 0 of the key `seed` and the counter
  `index`, in float32 as Triton's `tl.rand` has it. The low 32 bits of an index count: numbers come again after 2^32.
  A `uniform` of the same seed, with offset 0, is made of the same words: give the two different seeds.

Seeds and offsets are integers of 64 bits; 2^63 and more are the negative numbers of the same bits. A seed that each
rank reads from a tensor of its own gives each rank numbers of its own ([replicas](sharding.md)).

A `dropout` multiplies by the mask, as torch does: a NaN, or an infinity, that is dropped is NaN.

Numbers that are no distribution's are an `OperandError`, as in torch: bounds of a `uniform` that are NaN, infinite, or
beyond its type, a `minval` above `maxval`, a range that the type does not hold, and a `std` of a `normal` that is
negative or NaN. That is looked at in constants alone: scalars of a call are computed with as they are, and what is
drawn by such means nothing.

## Dims

| `dims` of a reduction | over |
|---|---|
| `None`, or left out | all axes |
| `[]` | none, as NumPy's `axis=()` |

Over none, `sum`, `mean`, `max` and the like give the elements, and `var` is the variance of each element alone, which
is NaN where `correction` is 1. This differs from torch, whose `sum`, `mean`, `amax` and `var` reduce everything for
`[]`, its `any` and `all` nothing. `torch.compile(backend="shardfuse")` has torch's meaning.

## Accuracy of variances

**In short**: if the mean of your data is more than 4000 times its standard deviation, cast to Double, or subtract a
constant near the mean first.

`var`, `var_mean` and `welford` of float32 and narrower floats subtract a mean that is rounded to float32: the variance
comes out too large by the square of that rounding, about `(mean * 6e-8) ** 2`. That is below a rounding of the variance
where the standard deviation is above `mean / 4000`, and 10 % of it for a mean of 1e4 and a deviation of 1e-3. torch's
own does not have this error; nor has shardfuse's where ranks share the axis that is reduced, because each sends the
rounding of its mean too.

## Special values

NaN, infinities and signs of zero come out as torch has them. These are the exceptions, in most of which torch itself
gives one result on a CPU and another on a GPU, or depends on the number of elements:

- which zero `maximum`, `minimum`, `clamp`, `max`, `min`, `amax` and `amin` give of zeros of both signs, and the sign of
  a zero that is a sum or a mean of such; which zero `gelu` gives of -0.0;
- floats cast to integers that do not hold them, NaN among them: whatever the device makes of it;
- integers divided by 0 in `trunc_div`, `floor_div`, `mod`, `fmod` and `remainder`: an error of torch's on a CPU, some
  number on a GPU; the smallest integer divided by -1 likewise;
- `mod`, `fmod` and `remainder` of floats whose quotient overflows: exact in kernels, maybe NaN on a CPU;
- on a GPU, results of `exp`, `exp2`, `sigmoid` and what is made of them are 0 where they would be below 1.2e-38, so
  that `silu` is -0.0 from -87.4 downwards;
- where a kernel holds rows of tensors that are summed over other axes too, a sum along the row of products with a
  factor that neighbours have alike (the weight of a channel) is made of the neighbours' sums, as torch makes the
  gradient of a group norm: it may be infinite where such a sum is, although none of the products are, and infinite
  where an infinite factor times values of both signs would be NaN;
- on a GPU, `rsqrt` of a denormal of float32 (below 1.2e-38) is infinite; other functions that take such an operand for
  0 differ from torch's by less than 1.2e-38;
- an integer tensor with one of a narrow float is converted to float32, in which both are computed, where torch on a
  CPU rounds it to the narrow type first: 0 of Half times 2**40 is 0, but NaN of torch on a CPU, as it is infinite in
  Half;
- `pow` of integers by a negative number is the whole part of the quotient (1, -1 or 0; 0 of 0), where torch raises;
- `sub` of a Bool and another type takes the Bool for 0 or 1, where torch raises; of two Bools it is refused, as there;
- `imag` of a real tensor is zeros, where torch raises; `any` and `all` of UInt8 are Bool, where torch has uint8;
- `erfcinv` of less than 1e-7 is what it should be, where torch, which has `erfinv(1 - x)`, gives infinity;
- shifts by less than 0 or by the type's bits and more are what torch's `bitwise_left_shift` and `bitwise_right_shift`
  give; `logical_right_shift` shifts by nothing, or everything out.
"""

RULES = {
    Rule.PROMOTE: "P to P",
    Rule.NARROW: "P to P, narrow floats as they are",
    Rule.INTEGER: "P, Bool as Int, to that",
    Rule.FLOAT: "P, integers as float32, to that",
    Rule.BOOL: "P to Bool",
    Rule.LOGICAL: "Bool to Bool",
    Rule.WHERE: "Bool, P and P to P",
    Rule.COMPLEX: "float32 or float64 to complex",
    Rule.DRAW: "Int to float32",
    Rule.REAL: "P to P, complex to its real type",
}

KERNEL = (
    "normal",
    "full",
    "full_like",
    "iota",
    "sum",
    "prod",
    "max",
    "min",
    "any",
    "all",
    "mean",
    "var",
    "var_mean",
    "welford",
    "cast",
    "set",
    "segment_set",
)
VIEWS = ("broadcast", "broadcast_in_dim", "expand", "squeeze", "unsqueeze", "permute", "transpose", "reshape")
WINDOWS = {
    "pad": "kernel; alone: torch call",
    "cat": "kernel, of 8 pieces at most; alone: torch call",
    "flip": "kernel; alone: torch call",
    "slice": "kernel; alone: view",
    "select": "kernel; alone: view; by an index of the call: torch call",
}
"""What a kernel reads at other places (``passes/windows.py``)."""
HOST = ("size", "shape")
GROUPS = {
    "build_reductions": "Reductions, scans and sorting",
    "build_shapes": "Shapes, slices, copies and constants",
    "build_calls": "Matrix products, attention and indexing",
    "build_random": "Random numbers",
    "builder": "Casts, bounds and triangles",
    "build": "Casts, bounds and triangles",
}
"""By the module that an op is built in."""


def page() -> str:
    lines = [HEAD, "## Pointwise", "", "| op | operands | types | runs as |", "|---|---|---|---|"]
    lines += [f"| `{op.name}` | {op.arity} | {types_of(op)} | {run_as(op)} |" for op in POINTWISE.values()]
    names = ", ".join(f"`{name}` is `{op}`" for name, op in ALIASES.items())
    lines += ["", f"Other names: {names}."]
    others = {
        n: f for n, f in inspect.getmembers(Ops, inspect.isfunction) if not n.startswith("_") and n not in POINTWISE
    }
    for title in dict.fromkeys(GROUPS.values()):
        lines += ["", f"## {title}", "", "| op | what it gives | runs as |", "|---|---|---|"]
        lines += [line_of(name, function) for name, function in others.items() if group_of(name, function) == title]
    return "\n".join(lines) + "\n"


def group_of(name: str, function: Callable[..., object]) -> str:
    return GROUPS["build_shapes" if name in HOST else function.__module__.rpartition(".")[2]]


def line_of(name: str, function: Callable[..., object]) -> str:
    summary = (
        (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ").replace("``", "`").replace("|", "\\|")
    )
    parameters = ", ".join(p for p in inspect.signature(function).parameters if p != "self")
    return f"| `{name}({parameters})` | {summary} | {how(name)} |"


def types_of(op: PointwiseOp) -> str:
    return RULES[op.rule] + ("; integers and Bool" if op.name in INTEGERS_ONLY else "")


def run_as(op: PointwiseOp) -> str:
    if op.triton is None:
        return "torch call"
    return "kernel; integers: torch call" if op.floats_only else "kernel"


def how(name: str) -> str:
    if name in HOST:
        return "host"
    if name in VIEWS:
        return "view"
    if name in WINDOWS:
        return WINDOWS[name]
    if name in TORCH_CALLS:
        return "torch call"
    if name == "uniform":
        return "kernel; torch calls where the bounds are scalars of the call"
    if name in ("amax", "amin", *KERNEL):
        return "kernel"
    return "kernel, of other ops"


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        if PAGE.exists() and PAGE.read_text() == text:
            return 0
        print("docs/ops.md is not up to date: run python scripts/generate_docs.py")
        return 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
