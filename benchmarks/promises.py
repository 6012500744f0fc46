"""What promises cost: a fusion that promises the same bits, beside one that does not, both of one size in turns.

The suite ``promises`` has ``invariant="batch"``: a promised result is right where rows of it, run alone and some
together, have the bits that they have among all.  ``promises_ranks`` has ``invariant="ranks"``, on one GPU; whether
several have the same bits is for ``tests/multirank/test_promised_ranks.py``.

*In a graph* is one of 10 calls in a CUDA graph.  Behind a flush of L2 a kernel's code comes from memory too, which
takes up to a microsecond more or less by where it happens to lie: of few rows that is much, and says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from shardfuse import DataType, FusionDefinition
from shardfuse.ir.tensor_view import TensorView

from .graphs import EACH, captured
from .report import Row
from .timing import Timed, measure

EPS = 1e-6
OWN, PROMISED = "shardfuse", "promised"
ROWS = (1, 8, 64, 512, 2048, 8192)
WIDTHS = {"cross_entropy": (32000, 128256), "softmax": (1024, 4096, 16384, 65536)}
"""Lengths of rows of some cases."""
OTHER_WIDTHS = (1024, 4096, 8192)
RANKS_WIDTHS = {"cross_entropy": (4096, 32000), "softmax": (128, 768, 4096, 5120, 16384)}
OTHER_RANKS_WIDTHS = (128, 768, 4096, 5120, 8192)
"""The same of ``promises_ranks``: of powers of two, and not; the shortest have several rows in a program."""
ELEMENTS = 1 << 29
"""Of a tensor at the most."""
Build = Callable[[FusionDefinition, int, DataType], None]


def _rows(fd: FusionDefinition, n: int, dtype: DataType) -> TensorView:
    return fd.define_tensor([-1, n], contiguity=True, dtype=dtype)


def _vector(fd: FusionDefinition, n: int, dtype: DataType) -> TensorView:
    return fd.define_tensor([n], contiguity=True, dtype=dtype)


def _wide(fd: FusionDefinition, *tensors: TensorView) -> list[TensorView]:
    return [fd.ops.cast(t, dtype=DataType.Float) for t in tensors]


def _out(fd: FusionDefinition, tensor: TensorView, dtype: DataType) -> None:
    fd.add_output(fd.ops.cast(tensor, dtype=dtype))


def _mean(fd: FusionDefinition, x: TensorView) -> TensorView:
    return fd.ops.mean(x, [-1], keepdim=True)


def _rms(fd: FusionDefinition, x: TensorView) -> TensorView:
    return fd.ops.rsqrt(fd.ops.add(_mean(fd, fd.ops.mul(x, x)), EPS))


def rms_norm(fd: FusionDefinition, n: int, dtype: DataType) -> None:
    x, w = _wide(fd, _rows(fd, n, dtype), _vector(fd, n, dtype))
    _out(fd, fd.ops.mul(fd.ops.mul(x, _rms(fd, x)), w), dtype)


def layer_norm(fd: FusionDefinition, n: int, dtype: DataType) -> None:
    x, w, b = _wide(fd, _rows(fd, n, dtype), _vector(fd, n, dtype), _vector(fd, n, dtype))
    var, mean = fd.ops.var_mean(x, [-1], correction=0, keepdim=True)
    normed = fd.ops.mul(fd.ops.sub(x, mean), fd.ops.rsqrt(fd.ops.add(var, EPS)))
    _out(fd, fd.ops.add(fd.ops.mul(normed, w), b), dtype)


def add_norm(fd: FusionDefinition, n: int, dtype: DataType) -> None:
    x, y, w = _wide(fd, _rows(fd, n, dtype), _rows(fd, n, dtype), _vector(fd, n, dtype))
    total = fd.ops.cast(fd.ops.add(x, y), dtype=dtype)
    fd.add_output(total)
    (x,) = _wide(fd, total)
    _out(fd, fd.ops.mul(fd.ops.mul(x, _rms(fd, x)), w), dtype)


def softmax(fd: FusionDefinition, n: int, dtype: DataType) -> None:
    (x,) = _wide(fd, _rows(fd, n, dtype))
    e = fd.ops.exp(fd.ops.sub(x, fd.ops.max(x, [-1], keepdim=True)))
    _out(fd, fd.ops.div(e, fd.ops.sum(e, [-1], keepdim=True)), dtype)


def cross_entropy(fd: FusionDefinition, n: int, dtype: DataType) -> None:
    """The loss of each row, and the gradient of its logits."""
    (x,) = _wide(fd, _rows(fd, n, dtype))
    target = fd.define_tensor([-1, 1], contiguity=True, dtype=DataType.Int)
    top = fd.ops.max(x, [-1], keepdim=True)
    total = fd.ops.sum(fd.ops.exp(fd.ops.sub(x, top)), [-1], keepdim=True)
    lse = fd.ops.add(fd.ops.log(total), top)
    hit = fd.ops.eq(fd.ops.broadcast(fd.ops.iota(n), [True, False]), target)
    picked = fd.ops.sum(fd.ops.where(hit, x, 0.0), [-1], keepdim=True)
    fd.add_output(fd.ops.sub(lse, picked))
    probability = fd.ops.exp(fd.ops.sub(x, lse))
    _out(fd, fd.ops.sub(probability, fd.ops.where(hit, 1.0, 0.0)), dtype)


def rms_norm_backward(fd: FusionDefinition, n: int, dtype: DataType) -> None:
    """The gradient of the rows; last that of the weight, which sums over them."""
    x, dy, w = _wide(fd, _rows(fd, n, dtype), _rows(fd, n, dtype), _vector(fd, n, dtype))
    rstd = _rms(fd, x)
    normed, g = fd.ops.mul(x, rstd), fd.ops.mul(dy, w)
    mean = _mean(fd, fd.ops.mul(g, normed))
    _out(fd, fd.ops.mul(fd.ops.sub(g, fd.ops.mul(normed, mean)), rstd), dtype)
    _out(fd, fd.ops.sum(fd.ops.mul(dy, normed), [0]), dtype)


def layer_norm_backward(fd: FusionDefinition, n: int, dtype: DataType) -> None:
    """The gradient of the rows; last those of weight and bias, which sum over them."""
    x, dy, w = _wide(fd, _rows(fd, n, dtype), _rows(fd, n, dtype), _vector(fd, n, dtype))
    var, mean = fd.ops.var_mean(x, [-1], correction=0, keepdim=True)
    rstd = fd.ops.rsqrt(fd.ops.add(var, EPS))
    normed, g = fd.ops.mul(fd.ops.sub(x, mean), rstd), fd.ops.mul(dy, w)
    inner = fd.ops.add(_mean(fd, g), fd.ops.mul(normed, _mean(fd, fd.ops.mul(g, normed))))
    _out(fd, fd.ops.mul(fd.ops.sub(g, inner), rstd), dtype)
    _out(fd, fd.ops.sum(fd.ops.mul(dy, normed), [0]), dtype)
    _out(fd, fd.ops.sum(dy, [0]), dtype)


def softmax_backward(fd: FusionDefinition, n: int, dtype: DataType) -> None:
    y, dy = _wide(fd, _rows(fd, n, dtype), _rows(fd, n, dtype))
    inner = fd.ops.sum(fd.ops.mul(y, dy), [-1], keepdim=True)
    _out(fd, fd.ops.mul(y, fd.ops.sub(dy, inner)), dtype)


CASES: dict[str, Build] = {
    f.__name__: f
    for f in (
        rms_norm, layer_norm, add_norm, softmax, cross_entropy, rms_norm_backward, layer_norm_backward,
        softmax_backward,
    )
}  # fmt: skip


def define(name: str, n: int, dtype: DataType, invariant: str | None = "batch") -> FusionDefinition:
    with FusionDefinition(invariant=invariant) as fd:
        CASES[name](fd, n, dtype)
    return fd


def inputs(fd: FusionDefinition, rows: int, n: int, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """Seeded; rows of other magnitudes, so that an order of additions shows."""
    generator = torch.Generator(device).manual_seed(17)
    found: list[torch.Tensor] = []
    for t in fd.fec.tensors():
        if t.dtype is DataType.Int:
            found.append(torch.randint(n, (rows, 1), generator=generator, device=device))
            continue
        shape = (rows, n) if t.ndim == 2 else (n,)
        found.append(torch.randn(shape, generator=generator, device=device).to(t.dtype.torch))
    return found


def of_rows(tensors: Sequence[torch.Tensor], first: int, count: int) -> list[torch.Tensor]:
    """The same for some of the rows, in storage of their own."""
    return [t[first : first + count].clone() if t.ndim == 2 else t for t in tensors]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def why_rows_differ(fd: FusionDefinition, given: list[torch.Tensor], counts: Sequence[int]) -> str | None:
    """Runs of some of the rows, from several places: which have other bits than among all; ``None`` where none has."""
    rows = next(len(t) for t in given if t.ndim == 2)
    whole = [t for t in fd.execute(given) if len(t) == rows and t.ndim == 2]
    for count in counts:
        for first in dict.fromkeys((0, 1, rows // 3, rows - count)):
            if not 0 <= first <= rows - count:
                continue
            some = [t for t in fd.execute(of_rows(given, first, count)) if t.ndim == 2 and len(t) == count]
            for k, (found, wanted) in enumerate(zip(some, whole, strict=True)):
                other = int((bits(found) != bits(wanted[first : first + count])).sum())
                if other:
                    return f"output {k}: {count} rows from {first}: {other} bytes differ"
    return None


def run_promises(
    seconds: float,
    device: torch.device,
    names: Sequence[str] = tuple(CASES),
    rows: Sequence[int] = ROWS,
    widths: Sequence[int] | None = None,
    *,
    invariant: str = "batch",
) -> Iterator[list[Row]]:
    """Rows case by case, in about ``seconds`` of timing."""
    of_name, others = (WIDTHS, OTHER_WIDTHS) if invariant == "batch" else (RANKS_WIDTHS, OTHER_RANKS_WIDTHS)
    work = [(name, n) for name in names for n in widths or of_name.get(name, others)]
    for name, n in work:
        yield [*_measured(name, n, rows, seconds / len(work), device, invariant)]


def _measured(
    name: str, n: int, rows: Sequence[int], seconds: float, device: torch.device, invariant: str
) -> Iterator[Row]:
    dtype = DataType.BFloat16
    fusions = {OWN: define(name, n, dtype, None), PROMISED: define(name, n, dtype, invariant)}
    sizes = [count for count in rows if count * n <= ELEMENTS]
    for count in sizes:
        given = inputs(fusions[OWN], count, n, device)
        outputs = fusions[OWN].execute(given)
        moved = sum(t.numel() * t.element_size() for t in (*given, *outputs))
        del outputs
        is_told = invariant == "batch" and count > 1
        wrong = why_rows_differ(fusions[PROMISED], given, (1, 3, count // 2)) if is_told else None
        runs = {impl: _run_of(fd, given) for impl, fd in fusions.items()}
        case = f"{count}x{n}:bfloat16"
        each = seconds / len(sizes) / (2 if device.type == "cuda" else 1)
        yield from _rows_of(name, case, moved, measure(runs, each, device), 1, wrong)
        if device.type == "cuda":
            graphs = {impl: captured(run) for impl, run in runs.items()}
            timed = measure(graphs, each, device)
            yield from _rows_of(f"{name}, in a graph", case, moved, timed, EACH, wrong)


def _rows_of(
    workload: str, case: str, moved: int, timed: dict[str, Timed], calls: int, wrong: str | None
) -> Iterator[Row]:
    """``calls``: that were timed together."""
    for impl, t in timed.items():
        ratio = f"{t.us / timed[OWN].us:.2f} x the time without" if impl == PROMISED else ""
        note = f"WRONG: {wrong}" if wrong and impl == PROMISED else ratio
        yield Row(workload, case, impl, moved, t.us / calls, t.low / calls, t.high / calls, note=note)


def _run_of(fd: FusionDefinition, given: list[torch.Tensor]) -> Callable[[], object]:
    return lambda: fd.execute(given)
