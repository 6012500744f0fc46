"""The index algebra, element by element: every property is checked at every index."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardfuse.ir.digits import (
    Axis,
    CutError,
    Digit,
    Root,
    axis_of,
    cut_out,
    digit_value,
    extent,
    merge,
    overlaps,
    refine,
    reshape,
    split,
    substitute,
    unify,
    value,
)
from shardfuse.ir.domain import BoundDomain, without
from shardfuse.ir.layout import Layout, is_present, local_extent
from shardfuse.mesh import DeviceMesh, ParallelType

SHAPES = st.lists(st.sampled_from((1, 2, 3, 4, 5, 6)), min_size=1, max_size=4)
fixed = settings(derandomize=True, database=None, deadline=None, max_examples=400)


def roots_of(shape: Sequence[int], name: str = "i") -> list[Root]:
    return [Root(f"{name}{k}", n) for k, n in enumerate(shape)]


def points(roots: Sequence[Root]) -> Iterator[dict[Root, int]]:
    """Every index, in row-major order."""
    for index in itertools.product(*(range(r.extent) for r in roots)):
        yield dict(zip(roots, index, strict=True))


def linear(values: Sequence[int], shape: Sequence[int]) -> int:
    out = 0
    for v, n in zip(values, shape, strict=True):
        out = out * n + v
    return out


def factors(total: int, rng: random.Random) -> list[int]:
    out: list[int] = []
    while total > 1:
        out.append(rng.choice([d for d in range(2, total + 1) if total % d == 0]))
        total //= out[-1]
    return out


# --- split, merge, reshape ---------------------------------------------------------------------------------


@fixed
@given(SHAPES, st.integers(1, 40))
def test_split_is_divmod(shape: list[int], inner: int) -> None:
    roots = roots_of(shape)
    whole = merge(*map(axis_of, roots))
    inner = min(inner, prod(shape))
    try:
        outer, low = split(whole, inner, uneven=True)
    except CutError:
        return
    for k, at in enumerate(points(roots)):
        assert (value(outer, at), value(low, at)) == divmod(k, inner)
    assert merge(outer, low) == whole


@fixed
@given(SHAPES, st.randoms(use_true_random=False))
def test_reshape_keeps_the_order(shape: list[int], rng: random.Random) -> None:
    roots = roots_of(shape)
    new = factors(prod(shape), rng)
    try:
        axes = reshape(map(axis_of, roots), new)
    except CutError:
        return
    for k, at in enumerate(points(roots)):
        assert linear([value(axis, at) for axis in axes], new) == k
    assert reshape(axes, shape) == tuple(map(axis_of, roots))


def test_most_cuts_are_found() -> None:
    """The properties above are not kept by refusing: a reshape to a refinement of the shape always works."""
    rng = random.Random(0)
    for _ in range(300):
        shape = [rng.choice((2, 3, 4, 6)) for _ in range(rng.randint(1, 3))]
        finer = [f for n in shape for f in factors(n, rng)]
        axes = [axis_of(r) for r in roots_of(shape)]
        assert reshape(reshape(axes, finer), shape) == tuple(axes)


def test_an_uneven_cut_is_only_of_the_outermost_digit() -> None:
    i, j = axis_of(Root("i", 3)), axis_of(Root("j", 5))
    assert extent(split(merge(i, j), 10, uneven=True)[0]) == 2
    with pytest.raises(CutError, match="share no cut"):
        split(merge(i, j), 3, uneven=True)
    with pytest.raises(CutError):
        split(j, 2)


# --- cut_out, without, refine ------------------------------------------------------------------------------


def random_digits(rng: random.Random, n: int) -> tuple[Root, list[Digit]]:
    """A root, and the digits of a few cuts of it, even and uneven, some of them of a piece."""
    root = Root("i", n)
    pieces: list[Axis] = [axis_of(root)]
    found: list[Digit] = []
    for _ in range(rng.randint(1, 3)):
        k = rng.randrange(len(pieces))
        inner = rng.randint(1, max(extent(pieces[k]), 1))
        try:
            pieces[k : k + 1] = split(pieces[k], inner, uneven=True)
        except CutError:
            continue
        found += [d for piece in pieces for d in piece]
    return root, found


def test_cut_out_leaves_what_stands_above_and_below() -> None:
    """An index is told by the three together, and by no two of them alone where the third has values."""
    rng = random.Random(1)
    checked = 0
    for _ in range(800):
        root, digits = random_digits(rng, rng.choice((4, 6, 7, 10, 12, 24)))
        for digit in digits:
            found = cut_out(axis_of(root), digit)
            if found is None:
                continue
            above, below = found
            seen = {tuple(value(axis, {root: k}) for axis in (above, (digit,), below)): k for k in range(root.extent)}
            assert len(seen) == root.extent, (root.extent, digit, found)
            order = sorted(seen)
            assert [seen[key] for key in order] == list(range(root.extent)), (root.extent, digit, found)
            checked += 1
    assert checked > 500


def test_cut_out_finds_every_digit_of_a_split() -> None:
    rng = random.Random(2)
    for _ in range(400):
        root, digits = random_digits(rng, rng.choice((4, 6, 7, 10, 12, 24)))
        for digit in digits:
            assert cut_out(axis_of(root), digit) is not None, (root.extent, digit)


def test_without_does_not_depend_on_the_order() -> None:
    """``torch.chunk`` of a ``torch.chunk``, 10 over 2 x 2 ranks: 3, 2, 3, 2."""
    root = Root("i", 10)
    first, rest = split(axis_of(root), 5)
    second, left = split(rest, 3, uneven=True)
    for order in itertools.permutations((*first, *second)):
        assert without(axis_of(root), tuple(order)) == left


def test_refine_gives_disjoint_atoms() -> None:
    rng = random.Random(3)
    done = 0
    for _ in range(600):
        root, digits = random_digits(rng, rng.choice((4, 6, 8, 12, 24)))
        try:
            atoms = refine(digits)
        except CutError:
            continue
        done += 1
        for d in digits:
            for k in range(root.extent):
                assert value(atoms[d], {root: k}) == digit_value(d, {root: k}), (d, atoms[d])
        every = list(dict.fromkeys(a for d in digits for a in atoms[d]))
        for a, b in itertools.combinations(every, 2):
            assert a.base != b.base or a.weight * a.extent <= b.weight or b.weight * b.extent <= a.weight
    assert done > 300


def test_cuts_without_a_common_one_are_refused() -> None:
    root = Root("i", 12)
    with pytest.raises(CutError, match="cuts of i at 4 and 6 share no common cut"):
        refine([Digit(root, 1, 4), Digit(root, 1, 6)])


# --- unify -------------------------------------------------------------------------------------------------


@fixed
@given(SHAPES, st.randoms(use_true_random=False))
def test_unify_names_the_same_elements(shape: list[int], rng: random.Random) -> None:
    """A free axis of several roots, one of them cut, in digits of another axis."""
    roots = roots_of(shape)
    free = roots_of(factors(prod(shape), rng), "y")
    a, b = merge(*map(axis_of, roots)), merge(*map(axis_of, free))
    if not free:
        return
    cut = rng.choice(free)
    high, low = split(axis_of(cut), rng.randint(1, cut.extent), uneven=True)
    try:
        rewritten = unify(a, b, [])
        new = substitute(high, rewritten), substitute(low, rewritten)
    except CutError:
        return
    for at, there in zip(points(roots), points(free), strict=True):
        assert value(substitute(b, rewritten), at) == value(b, there)
        assert (value(new[0], at), value(new[1], at)) == (value(high, there), value(low, there))


def test_a_tensor_never_holds_one_index_twice() -> None:
    i, j = (axis_of(Root(name, 4)) for name in "ij")
    with pytest.raises(CutError, match="are indices of one tensor"):
        unify(i, j, [(i, j)])
    assert overlaps([i, i])
    assert overlaps([i, split(i, 2)[0]])
    assert not overlaps([*split(i, 2), j])


def test_other_extents_are_refused() -> None:
    with pytest.raises(ValueError, match="extents differ: 4 and 6"):
        unify(axis_of(Root("i", 4)), axis_of(Root("j", 6)), [])


# --- extents of 1 and 0 ------------------------------------------------------------------------------------


def test_an_extent_of_one_is_a_broadcast_axis() -> None:
    assert axis_of(Root("i", 1)) == ()
    assert extent(()) == 1


def test_an_axis_without_elements_is_cut_between_its_digits() -> None:
    zero, six = axis_of(Root("z", 0)), axis_of(Root("i", 6))
    assert extent(merge(zero, six)) == 0
    assert reshape([zero, six], [0, 2, 3]) == (zero, *split(six, 3))
    assert reshape([six, zero], [6, 0]) == (six, zero)
    with pytest.raises(CutError):
        reshape([zero, six], [6, 0])
    with pytest.raises(CutError, match="at 0"):
        split(six, 0)
    assert unify(zero, axis_of(Root("y", 0)), []) != {}
    assert refine([*zero, *six]) == {zero[0]: zero, six[0]: six}
    with pytest.raises(ValueError, match="has extent -1"):
        axis_of(Root("n", -1))


# --- one rank's part ---------------------------------------------------------------------------------------


def pieces(domain: BoundDomain, root: Root, ranks: int) -> list[list[int]]:
    """The indices that each rank holds, by the value of its mesh digits alone."""
    held: list[list[int]] = []
    for rank in range(ranks):
        coordinates = domain.coordinates(rank)
        held.append(
            [k for k in range(root.extent) if all(digit_value(d, {root: k}) == c for d, c in coordinates.items())]
        )
    return held


@pytest.mark.parametrize(("rows", "ranks"), [(n, w) for n in (2, 3, 5, 6, 7, 8, 12, 13) for w in (2, 3, 4, 8)])
def test_chunks_as_torch_cuts_them(rows: int, ranks: int) -> None:
    root = Root("i", rows)
    outer, inner = split(axis_of(root), -(-rows // ranks), uneven=True)
    domain = BoundDomain((axis_of(root),), DeviceMesh(list(range(ranks))), ((ParallelType.mesh_x, outer),))
    chunk = -(-rows // ranks)
    wanted = [list(range(r * chunk, min((r + 1) * chunk, rows))) for r in range(ranks)]
    assert pieces(domain, root, ranks) == wanted
    assert [domain.local_shape(r) for r in range(ranks)] == [(len(w),) for w in wanted]
    for rank, held in enumerate(wanted):
        assert is_present(domain.coordinates(rank)) == bool(held)
        if held:
            assert prod(local_extent(d, domain.coordinates(rank)) for d in inner) == len(held)


def test_local_shapes_of_nested_chunks() -> None:
    """Every pair of mesh extents and both orders of the two cuts."""
    for rows, first, second in itertools.product((2, 3, 5, 7, 8, 10, 12), (2, 3, 4), (2, 3)):
        for p, q in ((ParallelType.mesh_y, ParallelType.mesh_x), (ParallelType.mesh_x, ParallelType.mesh_y)):
            root = Root("i", rows)
            outer, rest = split(axis_of(root), -(-rows // first), uneven=True)
            middle, _ = split(rest, -(-extent(rest) // second), uneven=True)
            shape = (first, second) if p is ParallelType.mesh_y else (second, first)
            mesh = DeviceMesh([[a * shape[1] + b for b in range(shape[1])] for a in range(shape[0])])
            sharding = tuple((t, digits) for t, digits in ((p, outer), (q, middle)) if digits)
            domain = BoundDomain((axis_of(root),), mesh, sharding)
            held = pieces(domain, root, mesh.size)
            if all(digits for digits in (outer, middle)):
                assert [domain.local_shape(r) for r in range(mesh.size)] == [(len(h),) for h in held], (rows, shape, p)


def test_a_shard_of_one_axis_leaves_the_others_whole() -> None:
    """2 rows of 3, cut out of one axis of 6, over 4 ranks: the last two hold [0, 3] and not [0, 0]."""
    root = Root("i", 6)
    rows, columns = split(axis_of(root), 3)
    domain = BoundDomain((rows, columns), DeviceMesh([0, 1, 2, 3]), ((ParallelType.mesh_x, rows),))
    assert [domain.local_shape(r) for r in range(4)] == [(1, 3), (1, 3), (0, 3), (0, 3)]


def test_layouts() -> None:
    root = Root("i", 6)
    high, low = split(axis_of(root), 3)
    layout = Layout.contiguous((low, high), {})
    assert sorted(range(6), key=lambda k: layout.offset({root: k})) == [0, 3, 1, 4, 2, 5]
    rows, columns = Root("r", 7), Root("c", 5)
    outer, inner = split(axis_of(rows), 2, uneven=True)
    coordinates: list[Mapping[Digit, int]] = [{outer[0]: q} for q in range(4)]
    assert [Layout.contiguous((inner, axis_of(columns)), c).extents for c in coordinates] == [(2, 5)] * 3 + [(1, 5)]
