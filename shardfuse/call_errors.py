"""Errors of ranks whose calls differ, as `errors.py` has the others: the class holds the sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .base_error import ShardfuseError


class ProgramMismatchError(ShardfuseError):
    """The ranks of a mesh came to run different programs. ``texts``: what each rank has, by rank.

    ``place``: which of their calls it is, where it is not the first of this program.
    ``names``: what each rank has called there, by rank, where that is known.
    """

    def __init__(self, texts: Mapping[int, str], place: str = "", names: Mapping[int, str] | None = None) -> None:
        lines = {rank: text.splitlines() for rank, text in texts.items()}
        longest = max(map(len, lines.values()))
        column = [{rank: _line(own, k) for rank, own in lines.items()} for k in range(longest)]
        at = next((k for k in range(longest) if len(set(column[k].values())) > 1), 0)
        found = _alike(column[at])
        called = _alike(names or {})
        is_first_line = at == 0 and len(called) > 1  # of calls of other kinds, whose lines have nothing in common
        shown = {f"`{name}`": ranks for name, ranks in called.items()} if is_first_line else found
        where = "" if is_first_line else f", line {at + 1} is the first that differs"
        have = _each(shown, "has", "have")
        if called and not is_first_line:
            have += f". Called there: {'; '.join(f'{name} by {_ranks(ranks)}' for name, ranks in called.items())}"
        advice = _advice(list(lines.values()), list(found))
        super().__init__(
            f"{f'at {place} ' if place else ''}the ranks do not run the same program{where}: {have}. {advice}"
        )
        self.ranks = tuple(tuple(ranks) for ranks in found.values())
        self.line = at + 1


class CallLeftOutError(ProgramMismatchError):
    """The error of a call was caught on some ranks, which have gone on, where others have made a call.

    left_out: what was left out, by rank; made: what the others have called in its place; place: which call it is.
    """

    def __init__(self, left_out: Mapping[int, str], made: Mapping[int, str], place: str) -> None:
        ShardfuseError.__init__(
            self,
            f"at {place} {_each(_alike(left_out), 'left out')}, and went on, where {_each(_alike(made), 'called')}. "
            "Each later call may have met the other ranks' call before it, so that results mix both. Have the error of "
            "such a call end its rank, or have all ranks agree to leave the call out",
        )
        self.ranks = tuple(sorted(left_out)), tuple(sorted(made))
        self.line = 1


def _alike(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """The ranks that have each text."""
    found: dict[str, list[int]] = {}
    for rank, text in texts.items():
        found.setdefault(text, []).append(rank)
    return found


def _each(found: Mapping[str, Sequence[int]], verb: str, plural: str | None = None) -> str:
    """What the ranks of each text do.  ``plural``: of the verb, where that is another word."""
    verbs = verb, plural or verb
    return "; ".join(f"{_ranks(ranks)} {verbs[len(ranks) > 1]} {text}" for text, ranks in found.items())


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _line(lines: Sequence[str], k: int) -> str:
    return f"`{lines[k].strip()}`" if k < len(lines) else "nothing more"


def _advice(texts: Sequence[Sequence[str]], found: Sequence[str]) -> str:
    if all(len(lines) == 1 for lines in texts):
        return "Call the same collectives on every rank, on tensors of one shape and dtype, in the same order"
    advice = (
        "Give every rank of the mesh the same definition, dtypes, unsharded sizes, mesh and options, in the same order"
    )
    if any(": unsharded [" in line for line in found):
        advice += (
            "; where their shards differ in size, say of what: by the shape in define_tensor(), sizes= of "
            "shardfuse.FusionDefinition.execute(), unsharded= of a module of shardfuse.nn, or a DTensor"
        )
    return advice
