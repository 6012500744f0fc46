"""Which digits are shorter on some rank, against the extents that each rank has."""

from __future__ import annotations

from itertools import product

import pytest

from shardfuse.ir.digits import Digit, Root
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
