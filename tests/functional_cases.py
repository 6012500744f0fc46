"""Every function of shardfuse.nn.functional beside torch's, for a CPU, Triton's interpreter and a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as theirs
from torch_answers import compare as check_near
from torch_gradients import leaf, with_gradients

from shardfuse.nn import functional

Function = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """``ours`` is ``reference``, of normal tensors of these shapes."""

    ours: Function
    reference: Function
    shapes: Sequence[Sequence[int]]


def check(case: Case, dtype: torch.dtype, device: str = "cpu") -> None:
    """Results and gradients of every tensor."""
    generator = torch.Generator().manual_seed(0)

    def normal(shape: Sequence[int], of: torch.dtype) -> Tensor:
        return torch.randn(tuple(shape), dtype=torch.float64, generator=generator).to(device, of)

    def several(function: Function, *given: Tensor) -> tuple[Tensor, ...]:
        found = function(*given)
        return (found,) if isinstance(found, Tensor) else tuple(found)

    tensors = [normal(shape, dtype) for shape in case.shapes]
    leaves = [leaf(t) for t in tensors]
    results = several(case.ours, *leaves)
    upstream = [normal(t.shape, t.dtype) for t in results]
    torch.autograd.backward(results, upstream)
    expected = with_gradients(lambda *given: several(case.reference, *given), tensors, upstream)
    for k, (got, want) in enumerate(zip([*results, *(t.grad for t in leaves)], expected, strict=True)):
        assert got is not None
        check_near(f"result or gradient {k}", got.detach(), want)


def widened(function: Function) -> Function:
    """A loss in float32, which is what shardfuse returns."""
    return lambda x: function(x.to(torch.promote_types(x.dtype, torch.float32)))


def last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def targets(x: Tensor) -> Tensor:
    rows = x.shape[:-1]
    return (torch.arange(rows.numel(), device=x.device) % x.shape[-1]).view(rows)


def projected(x: Tensor) -> list[Tensor]:
    """Queries and keys, views of one projection [batch, sequence, 3, heads, features]."""
    q, k, _ = x.permute(2, 0, 3, 1, 4)
    return [q, k[:, :2]]


def angles(x: Tensor) -> tuple[Tensor, Tensor]:
    table = torch.linspace(0, 3, x.shape[1] * x.shape[-1] // 2, device=x.device).view(x.shape[1], -1)
    return table.cos(), table.sin()


def rotated(x: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    cos, sin = (t.to(wide.dtype) for t in angles(x))

    def turn(t: Tensor) -> Tensor:
        a, b = (t[..., ::2], t[..., 1::2]) if interleaved else t.chunk(2, -1)
        pair = a * cos - b * sin, b * cos + a * sin
        return (torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)).to(x.dtype)

    return tuple(map(turn, projected(wide)))


def entropies(x: Tensor) -> tuple[Tensor, ...]:
    logs = theirs.log_softmax(x / 0.7, -1)
    return logs.gather(-1, targets(x)[..., None])[..., 0], -(logs.exp() * logs).sum(-1)


ROWS, VECTOR, IMAGE, CHANNELS = (4, 5, 16), (16,), (3, 8, 4, 6), (8,)
CASES = {
    "rms_norm": Case(
        lambda x, w: functional.rms_norm(x, (16,), w, 1e-6),
        lambda x, w: theirs.rms_norm(x, (16,), w, 1e-6),
        [ROWS, VECTOR],
    ),
    "rms_norm_of_two_dims": Case(
        lambda x: functional.rms_norm(x, [5, 16], eps=1e-6), lambda x: theirs.rms_norm(x, [5, 16], None, 1e-6), [ROWS]
    ),
    "layer_norm": Case(
        lambda x, w, b: functional.layer_norm(x, (16,), w, b),
        lambda x, w, b: theirs.layer_norm(x, (16,), w, b),
        [ROWS, VECTOR, VECTOR],
    ),
    "layer_norm_of_all": Case(
        lambda x: functional.layer_norm(x, (4, 5, 16)), lambda x: theirs.layer_norm(x, (4, 5, 16)), [ROWS]
    ),
    "add_layer_norm": Case(
        lambda x, r, w, b: functional.add_layer_norm(x, r, (16,), w, b),
        lambda x, r, w, b: (theirs.layer_norm(r + x, (16,), w, b), r + x),
        [ROWS, ROWS, VECTOR, VECTOR],
    ),
    "add_rms_norm": Case(
        lambda x, r, w: functional.add_rms_norm(x, r, (16,), w, 1e-6),
        lambda x, r, w: (theirs.rms_norm(r + x, (16,), w, 1e-6), r + x),
        [ROWS, ROWS, VECTOR],
    ),
    "group_norm": Case(
        lambda x, c, d: functional.group_norm(x, 4, c, d),
        lambda x, c, d: theirs.group_norm(x, 4, c, d),
        [IMAGE, CHANNELS, CHANNELS],
    ),
    "group_norm_silu": Case(
        lambda x, c: functional.group_norm(x, 4, c, activation="silu"),
        lambda x, c: theirs.silu(theirs.group_norm(x, 4, c)),
        [IMAGE, CHANNELS],
    ),
    "group_norm_channels_last": Case(
        lambda x, c, d: functional.group_norm(last(x), 4, c, d, activation="silu"),
        lambda x, c, d: theirs.silu(theirs.group_norm(x, 4, c, d)),
        [IMAGE, CHANNELS, CHANNELS],
    ),
    "batch_norm": Case(
        lambda x, c, d: functional.batch_norm(x, None, None, c, d, True),
        lambda x, c, d: theirs.batch_norm(x, None, None, c, d, True),
        [IMAGE, CHANNELS, CHANNELS],
    ),
    "batch_norm_channels_last": Case(
        lambda x, c, d: functional.batch_norm(last(x), None, None, c, d, True),
        lambda x, c, d: theirs.batch_norm(x, None, None, c, d, True),
        [IMAGE, CHANNELS, CHANNELS],
    ),
    "softmax": Case(lambda x: functional.softmax(x, 1, scale=0.5), lambda x: theirs.softmax(0.5 * x, 1), [ROWS]),
    "log_softmax": Case(functional.log_softmax, lambda x: theirs.log_softmax(x, -1), [ROWS]),
    "gelu": Case(functional.gelu, theirs.gelu, [ROWS]),
    "gelu_tanh": Case(lambda x: functional.gelu(x, "tanh"), lambda x: theirs.gelu(x, approximate="tanh"), [ROWS]),
    "geglu": Case(functional.geglu, lambda x, y: theirs.gelu(x) * y, [ROWS, ROWS]),
    "swiglu": Case(functional.swiglu, lambda x: theirs.silu(x[..., :8]) * x[..., 8:], [ROWS]),
    "rotary_embedding": Case(
        lambda x: functional.rotary_embedding(*projected(x), *angles(x)),
        lambda x: rotated(x, False),
        [(2, 6, 3, 4, 16)],
    ),
    "rotary_embedding_interleaved": Case(
        lambda x: functional.rotary_embedding(*projected(x), *angles(x), interleaved=True),
        lambda x: rotated(x, True),
        [(2, 6, 3, 4, 16)],
    ),
    "cross_entropy": Case(
        lambda x: functional.cross_entropy(x, targets(x), label_smoothing=0.1),
        widened(lambda x: theirs.cross_entropy(x.mT, targets(x), label_smoothing=0.1)),
        [ROWS],
    ),
    "log_prob_and_entropy": Case(
        lambda x: functional.log_prob_and_entropy(x, targets(x), temperature=0.7), widened(entropies), [ROWS]
    ),
}
