"""Which digits are shorter on some rank, against the extents that each rank has."""

from __future__ import annotations

import random
from contextlib import suppress
from itertools import product

import pytest

from shardfuse.ir.digits import CutError, Digit, Root, axis_of, extent, split
from shardfuse.ir.layout import is_uneven, local_extent

SIZES = [1, 2, 5, 6, 8, 12, 15]


def shorter_somewhere(digit: Digit, parallel: list[Digit]) -> bool:
    """By the extents of every rank."""
    ranks = product(*(range(m.extent) for m in parallel))
    return any(local_extent(digit, dict(zip(parallel, at, strict=True))) < digit.extent for at in ranks)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_one_cut_of_an_axis(size: int, ranks: int) -> None:
    root = Root("i0", size)
    local = -(-size // ranks)
    mesh = Digit(root, local, -(-size // local))
    assert is_uneven(Digit(root, 1, local), [mesh]) == shorter_somewhere(Digit(root, 1, local), [mesh])
    for inner in (n for n in range(2, local) if local % n == 0):
        outer, innermost = Digit(root, inner, local // inner), Digit(root, 1, inner)
        assert is_uneven(outer, [mesh]) or not shorter_somewhere(outer, [mesh])
        assert is_uneven(outer, [mesh]) == bool(size % local)
        assert not is_uneven(innermost, [mesh])
        assert not is_uneven(innermost, [])


@pytest.mark.parametrize(("size", "expected"), [(16, False), (15, True), (12, False), (9, True)])
def test_two_cuts_of_an_axis(size: int, expected: bool) -> None:
    root = Root("i0", size)
    half = -(-size // 2)
    first = Digit(root, half, 2)
    rest = Digit(root, 1, half)
    quarter = -(-half // 2)
    second, local = Digit(rest, quarter, 2), Digit(rest, 1, quarter)
    assert is_uneven(local, [first, second]) == expected == shorter_somewhere(local, [first, second])


def test_a_rank_that_has_nothing_between_two_cuts() -> None:
    """12 elements, 4 on each of 2 x 2 ranks: the cut next to the elements is even, and the last rank has none."""
    root = Root("i0", 12)
    outer, inner, local = Digit(root, 8, 2), Digit(root, 4, 2), Digit(root, 1, 4)
    assert shorter_somewhere(local, [outer, inner])
    assert is_uneven(local, [outer, inner])


def test_cuts_drawn_at_random() -> None:
    """Up to four uneven splits of an axis, of which one or two are parallel."""
    draw, asked = random.Random(0), 0
    for _ in range(3000):
        axes = [axis_of(Root("i0", draw.randint(2, 40)))]
        for _ in range(draw.randint(1, 4)):
            k = draw.randrange(len(axes))
            with suppress(CutError):  # some merged digits have no such split
                axes[k : k + 1] = split(axes[k], draw.randint(1, max(extent(axes[k]), 1)), uneven=True)
        whole = [k for k, axis in enumerate(axes) if len(axis) == 1]
        chosen = draw.sample(whole, min(len(whole), draw.randint(1, 2)))
        parallel = [axes[k][0] for k in chosen]
        for digit in (d for k, axis in enumerate(axes) if k not in chosen for d in axis):
            asked += 1
            assert is_uneven(digit, parallel) or not shorter_somewhere(digit, parallel), (axes, parallel, digit)
    assert asked > 1000
