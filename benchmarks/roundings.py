"""How near to float64 a result has to be, for tests and benchmarks: the one statement of the rule.

The error of an element is its distance from the same program in float64 on unsharded tensors. It is counted in
*roundings*: the spacing of the result's dtype at that element's own magnitude, at least its smallest step. Allowed are

    n roundings of the element (1 to 4, stated by the caller: what the op itself rounds)
    + 2 x the largest error of eager torch, in the same dtype on the same inputs, in that element's row
    + where the caller gives them, n roundings of the magnitude of the terms that were added up (a sum near 0 is as
      wrong as its terms are), in the dtype in which sums are accumulated

Probabilities (``relative``) are held relatively: eager's error in the row is taken as a fraction of each element, so
that the small ones count like the large, and the sums of the rows are held to the same rule. Integers, booleans, the
places of NaN, infinities and the signs of zeros are equal, and so are dtype and shape. bfloat16 and half are held to
their own roundings as float32 is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EAGER = 2
"""How many times eager torch's own largest error in a row is allowed there."""


def spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbours of ``dtype`` at ``|x|``, in float64; below its normal numbers the smallest step.

    x: float64 of any shape; infinities and NaN give NaN.
    """
    info = torch.finfo(dtype)
    size = x.abs().clamp(min=info.smallest_normal)
    # A power of two, so that the division is exact.  torch.ldexp runs on the thread's current GPU, wherever x is.
    step = size / (2 * torch.frexp(size).mantissa) * info.eps
    return torch.where(x.isfinite(), step, torch.full_like(x, float("nan")))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of ``dtype`` are accumulated."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def mismatch(
    found: Tensor,
    wide: Tensor,
    eager: Tensor | None = None,
    *,
    n: float = 2,
    rows: int | None = -1,
    relative: bool = False,
    terms: Tensor | None = None,
    signed: bool = True,
    slack: Callable[[], Tensor] | None = None,
) -> str | None:
    """What is wrong with ``found``, in a sentence; None where it is right.

    wide: the same in float64 (complex128; as it is for integers). eager: the same by eager torch, in ``found``'s
    dtype; left out, no error of eager's is allowed. n: roundings of each element. rows: the dim along which a row
    runs, of which the largest error of eager's counts; None counts each element's own alone. relative: see above.
    terms: of each element the sum of the magnitudes of what was added up. signed: are signs of zeros compared?
    slack: what is allowed further, asked for only where the rest does not do; the caller says what it is made of.
    Shapes are equal (``terms`` may broadcast).
    """
    wanted = wide if eager is None else eager
    if found.shape != wanted.shape or wide.shape != wanted.shape:
        return f"shape {list(found.shape)}, expected {list(wanted.shape)}"
    if eager is not None and found.dtype != eager.dtype:
        return f"{found.dtype}, expected {eager.dtype}"
    if found.numel() == 0:
        return None
    if not (found.is_floating_point() or found.is_complex()):
        return _unequal(found, wanted)
    if found.is_complex():
        return _complex_mismatch(found, wide, eager, n, rows)
    wide = wide.double()
    wrong = _special_mismatch(found, wide, eager, signed)
    if wrong is not None:
        return wrong
    allowed = n * spacing(wide, found.dtype) + _eager_error(wide, eager, rows, relative)
    if terms is not None:
        allowed = allowed + n * spacing(terms.double().expand_as(wide), accumulator(found.dtype))
    error = (found.double() - wide).abs()
    compared = error.isfinite()  # the others are equal: see above
    if (compared & ~(error <= allowed)).any() and slack is not None:
        allowed = allowed + slack()
    bad = compared & ~(error <= allowed)
    if bad.any():
        return _worst(found, wide, eager, error, allowed, bad)
    return _sums_mismatch(found, wide, eager, rows) if relative and rows is not None else None


def assert_near(
    found: Tensor,
    wide: Tensor,
    eager: Tensor | None = None,
    *,
    n: float = 2,
    rows: int | None = -1,
    relative: bool = False,
    terms: Tensor | None = None,
    signed: bool = True,
    slack: Callable[[], Tensor] | None = None,
    what: str = "",
) -> None:
    """Raises AssertionError where ``mismatch`` has something to say; ``what`` names the result."""
    wrong = mismatch(found, wide, eager, n=n, rows=rows, relative=relative, terms=terms, signed=signed, slack=slack)
    if wrong is not None:
        raise AssertionError(f"{what}: {wrong}" if what else wrong)


def _eager_error(wide: Tensor, eager: Tensor | None, rows: int | None, relative: bool) -> Tensor:
    """What eager's error in the row allows each element."""
    if eager is None:
        return torch.zeros_like(wide)
    off = (eager.double() - wide).abs()
    scale = wide.abs() if relative else torch.ones_like(wide)
    off = torch.where(off.isfinite() & (scale > 0), off / scale, 0.0)
    if rows is not None and wide.ndim:
        off = off.amax(rows, keepdim=True)
    return EAGER * off * scale


def _special_mismatch(found: Tensor, wide: Tensor, eager: Tensor | None, signed: bool) -> str | None:
    """NaN, infinities and zeros: as eager torch has them, or where it is not asked as float64 rounded to the dtype.

    Where one of eager torch and float64 has a NaN or an infinity and the other has none, either is right: one in
    float64 that roundings lose, or one that eager torch's intermediate results make; a number is then held to float64.
    """
    own = wide.to(found.dtype).double() if eager is None else eager.double()
    mine = found.double()
    same = (mine == own) | (mine.isnan() & own.isnan())
    if eager is not None:
        same |= own.isfinite() & ((mine == wide) | (mine.isnan() & wide.isnan()))
        same |= ~own.isfinite() & mine.isfinite() & wide.isfinite()
    zero = (own == 0) & (wide == 0) & (mine == 0)
    bad = ~(own.isfinite() & mine.isfinite()) & ~same
    if signed:
        bad |= zero & (mine.signbit() != own.signbit())
    if not bad.any():
        return None
    at = _first(bad)
    return f"element {list(at)} is {found[at].item()}, expected {own[at].item()}; {int(bad.sum())} such"


def _sums_mismatch(found: Tensor, wide: Tensor, eager: Tensor | None, rows: int) -> str | None:
    """The sums of the rows of probabilities: half a rounding of the sum, and twice what eager's are off anywhere.

    Each element is within n roundings already; where all of a row are off the same way, their sum tells.
    """
    if not wide.ndim:
        return None
    sums, right = found.double().sum(rows), wide.sum(rows)
    allowed = right.abs() * torch.finfo(found.dtype).eps / 2
    if eager is not None:
        off = (eager.double().sum(rows) - right).abs()
        allowed = allowed + EAGER * torch.where(off.isfinite(), off, 0.0).amax()
    error = (sums - right).abs()
    bad = error.isfinite() & ~(error <= allowed)
    return f"sums of rows: {_worst(sums, right, None, error, allowed, bad)}" if bad.any() else None


def _complex_mismatch(found: Tensor, wide: Tensor, eager: Tensor | None, n: float, rows: int | None) -> str | None:
    """As one number in the plane: roundings of its absolute value."""
    parts = torch.view_as_real(found)
    own = torch.view_as_real((wide if eager is None else eager).to(torch.complex128).resolve_conj())
    whole = own.isfinite().all(-1)
    same = (parts.double() == own) | (parts.isnan() & own.isnan())
    broken = ~whole & ~same.all(-1) & ~(found.isnan() & own.isnan().any(-1))
    error = (found.to(torch.complex128) - wide.to(torch.complex128)).abs()
    size = wide.to(torch.complex128).abs()
    allowed = n * spacing(size, parts.dtype)
    if eager is not None:
        off = (eager.to(torch.complex128) - wide).abs()
        off = torch.where(off.isfinite(), off, 0.0)
        allowed = allowed + EAGER * (off if rows is None or not off.ndim else off.amax(rows, keepdim=True))
    bad = broken | (whole & ~(error <= allowed))
    if not bad.any():
        return None
    at = _first(bad)
    return f"element {list(at)} is {found[at].item()}, expected {wide[at].item()}; {int(bad.sum())} such"


def _unequal(found: Tensor, wanted: Tensor) -> str | None:
    bad = found != wanted
    if not bad.any():
        return None
    at = _first(bad)
    return f"element {list(at)} is {found[at].item()}, expected {wanted[at].item()}; {int(bad.sum())} such"


def _worst(found: Tensor, wide: Tensor, eager: Tensor | None, error: Tensor, allowed: Tensor, bad: Tensor) -> str:
    """The element that is off by most of what it may be."""
    over = torch.where(bad, error / allowed.clamp(min=1e-300), -1.0)
    at = tuple(int(k) for k in torch.unravel_index(over.argmax(), over.shape))
    step = spacing(wide[at], found.dtype).item()
    theirs = "" if eager is None else f", eager torch {eager[at].item()}"
    return (
        f"element {list(at)} is {found[at].item()}, in float64 {wide[at].item()}{theirs}: off by "
        f"{error[at].item() / step:.3g} roundings of {step:.3g}, {allowed[at].item() / step:.3g} allowed; "
        f"{int(bad.sum())} of {bad.numel()} are off"
    )


def _first(bad: Tensor) -> tuple[int, ...]:
    return tuple(int(k) for k in bad.nonzero()[0])
