"""Writes docs/ops.md from the tables of ops: every op, its types and how it runs.

python scripts/generate_docs.py           writes the page
python scripts/generate_docs.py --check   ends with exit code 1 if it is not what would be written
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from shardfuse.ops.build import ALIASES, Ops
from shardfuse.ops.builder import INTEGERS_ONLY
from shardfuse.ops.table import POINTWISE, PointwiseOp, Rule
from shardfuse.ops.torch_calls import TORCH_CALLS

PAGE = Path(__file__).parents[1] / "docs/ops.md"

HEAD = """# Ops

Written by `scripts/generate_docs.py` from the tables in `shardfuse/ops/`; do not edit.

Operands are TensorViews, scalars of the fusion and Python numbers, broadcast as numpy does. `P` is the type that torch
promotes the operands to; unsigned integers of 16 bits and more and 8-bit floats are not promoted: cast them first.
Narrow floats (16 and 8 bits) are computed in float32 and rounded to their own type, once for each op: `mean`, `var`,
`var_mean` and `welford` are one op each, sharded and unsharded, while a `sum` and a `div` are two and round twice.

- *kernel*: fused with what stands around it. Complex numbers are a torch call in any op.
- *torch call*: one call of torch, which is a segment of its own.
- *view*: nothing runs; the result shares the input's storage.

Where a torch call cannot be computed on shards of an axis (a scan along it, a slice of it), it is gathered first.

## Numbers

Python's and NumPy's scalars are operands, in the type that the op computes in: a float beyond it is infinite, a
negative number wraps in an unsigned type, any other integer that the type does not hold is an `OperandError`. A
constant is refused when the op is recorded; a scalar input, a size, and what is computed from them, in the call,
before anything is written. What `iota` counts to wraps. Under `torch.compile` all such integers wrap, as they do in
eager torch.

## Indices

An index beyond its axis is an error on a CPU (`IndexRangeError`: the op, the index, its value, what is allowed, the
line). On a GPU no index is read, as the host would have to wait for it: there it is torch's kernel that ends, with a
`device-side assert`, after which CUDA takes no more calls; run the program on a CPU to see which index it was.
`take_along_axis`, `index_put_accumulate` and `select` take negative ones, as torch does, the others do not.

## Dims

A reduction over `dims=None`, or with `dims` left out, is over all axes. Over `dims=[]` it is over none, as NumPy has it
for `axis=()`: `sum`, `mean`, `max` and the like give the elements, and `var` is the variance of each element alone,
which is NaN as of any single one where `correction` is 1. torch's `sum`, `mean`, `amax` and `var` reduce everything for
`[]`, its `any` and `all` nothing. `torch.compile(backend="shardfuse")` has torch's meaning.

## Accuracy of variances

`var`, `var_mean` and `welford` of float32 and narrower floats subtract a mean that is rounded to float32: the variance
comes out too large by the square of that rounding, about `(mean * 6e-8) ** 2`. That is below a rounding of the variance
where the standard deviation is above `mean / 4000`, and 10 % of it for a mean of 1e4 and a deviation of 1e-3. torch's
own does not have it; nor has shardfuse's where ranks share the axis that is reduced, as each sends the rounding of its
mean too. Cast such data to Double, or subtract a constant near the mean first.

## Special values

NaN, infinities and signs of zero come out as torch has them, but where torch itself gives one result on a CPU and
another on a GPU, or depends on the number of elements:

- which zero `maximum`, `minimum`, `clamp`, `max`, `min`, `amax` and `amin` give of zeros of both signs, and the sign of
  a zero that is a sum or a mean of such;
- floats cast to integers that do not hold them, NaN among them: whatever the device makes of it;
- integers divided by 0 in `trunc_div`, `floor_div`, `mod`, `fmod` and `remainder`: an error of torch's on a CPU, some
  number on a GPU; the smallest integer divided by -1 likewise;
- `mod`, `fmod` and `remainder` of floats whose quotient overflows: exact in kernels, maybe NaN on a CPU;
- on a GPU, results of `exp`, `exp2`, `sigmoid` and what is made of them are 0 where they would be below 1.2e-38, so
  that `silu` is -0.0 from -87.4 downwards;
- on a GPU, `rsqrt` of a denormal of float32 (below 1.2e-38) is infinite; other functions that take such an operand for
  0 differ from torch's by less than 1.2e-38;
- an integer tensor beside one of a narrow float is converted to float32, in which both are computed, where torch on a
  CPU rounds it to the narrow type first: 0 of Half times 2**40 is 0, but NaN of torch on a CPU, as it is infinite in
  Half;
- `pow` of integers by a negative number is the whole part of the quotient (1, -1 or 0; 0 of 0), where torch raises;
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


def page() -> str:
    lines = [HEAD, "## Pointwise", "", "| op | operands | types | runs as |", "|---|---|---|---|"]
    lines += [f"| `{op.name}` | {op.arity} | {types_of(op)} | {run_as(op)} |" for op in POINTWISE.values()]
    names = ", ".join(f"`{name}` is `{op}`" for name, op in ALIASES.items())
    lines += ["", f"Other names: {names}.", "", "## Others", "", "| op | what it gives | runs as |", "|---|---|---|"]
    for name, function in inspect.getmembers(Ops, inspect.isfunction):
        if name.startswith("_") or name in POINTWISE:
            continue
        summary = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        parameters = ", ".join(p for p in inspect.signature(function).parameters if p != "self")
        lines.append(f"| `{name}({parameters})` | {summary} | {how(name)} |")
    return "\n".join(lines) + "\n"


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
