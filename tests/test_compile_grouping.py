"""Groups of random graphs: convex, all of them at once, and no two left apart that one edge could have joined."""

from __future__ import annotations

import random

from shardfuse.compile.grouping import grouped


def random_graph(rng: random.Random) -> tuple[list[list[int]], list[bool], list[int], list[int]]:
    n = rng.randint(2, 24)
    density = rng.choice((0.05, 0.15, 0.4))
    followers = [[m for m in range(k + 1, n) if rng.random() < density] for k in range(n)]
    joinable = [rng.random() < rng.choice((0.5, 0.9)) for _ in range(n)]
    seeds = [k for k in range(n) if joinable[k] and rng.random() < 0.3]
    cuts = sorted(rng.sample(range(n), rng.choice((0, 0, 1)) if n > 2 else 0))
    epochs = [sum(k >= c for c in cuts) for k in range(n)]
    return followers, joinable, seeds, epochs


def condensed(followers: list[list[int]], groups: list[list[int]]) -> dict[int, set[int]]:
    """The graph with each group as one node, named by its first."""
    of = {n: n for n in range(len(followers))}
    for group in groups:
        for n in group:
            of[n] = group[0]
    edges: dict[int, set[int]] = {of[n]: set() for n in of}
    for n, after in enumerate(followers):
        edges[of[n]] |= {of[m] for m in after if of[m] != of[n]}
    return edges


def has_cycle(edges: dict[int, set[int]]) -> bool:
    waiting = {n: sum(n in after for after in edges.values()) for n in edges}
    ready = [n for n, k in waiting.items() if not k]
    done = 0
    while ready:
        done += 1
        for m in edges[ready.pop()]:
            waiting[m] -= 1
            if not waiting[m]:
                ready.append(m)
    return done < len(edges)


def test_groups_are_convex_and_maximal() -> None:
    for seed in range(1500):
        followers, joinable, seeds, epochs = random_graph(random.Random(seed))
        groups = grouped(followers, joinable, seeds, epochs)
        members = [n for g in groups for n in g]
        assert len(members) == len(set(members)), f"seed {seed}: a node in two groups"
        assert all(joinable[n] for n in members), f"seed {seed}: a node that is not joinable"
        assert set(seeds) <= set(members), f"seed {seed}: a seed in no group"
        assert all(set(g) & set(seeds) for g in groups), f"seed {seed}: a group without a seed"
        assert all(len({epochs[n] for n in g}) == 1 for g in groups), f"seed {seed}: a group in two epochs"
        assert not has_cycle(condensed(followers, groups)), f"seed {seed}: {groups}"
        for group in groups:
            assert_is_maximal(followers, joinable, epochs, groups, group, seed)


def assert_is_maximal(
    followers: list[list[int]], joinable: list[bool], epochs: list[int], groups: list[list[int]], group: list[int],
    seed: int,
) -> None:  # fmt: skip
    """No single node beside a group could be added to it."""
    taken = {n for g in groups for n in g}
    inside = set(group)
    for n, after in enumerate(followers):
        for m in after:
            other = n if m in inside else m if n in inside else None
            if other is None or other in taken or not joinable[other] or epochs[other] != epochs[group[0]]:
                continue
            with_it = [sorted([*g, other]) if g is group else g for g in groups]
            assert has_cycle(condensed(followers, with_it)), f"seed {seed}: {other} could join {group}"


def test_siblings_join_where_nothing_stands_between() -> None:
    followers = [[1, 2], [], [3], []]
    assert grouped(followers, [False, True, True, True], [1, 2], [0] * 4) == [[1], [2, 3]]
    assert grouped(followers, [False, True, True, True], [1, 2], [0] * 4, [(1, 2)]) == [[1, 2, 3]]
    between = [[1, 2], [4], [3], [], [2]]  # 1 -> 4 -> 2, of which 4 may not be in a group
    order = {0: 0, 1: 1, 4: 2, 2: 3, 3: 4}
    followers = [[] for _ in between]
    for n, after in enumerate(between):
        followers[order[n]] = sorted(order[m] for m in after)
    assert grouped(followers, [False, True, False, True, True], [1, 3], [0] * 5, [(1, 3)]) == [[1], [3, 4]]
