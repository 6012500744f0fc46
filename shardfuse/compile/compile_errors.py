"""Errors of ``shardfuse.compile``.  The constructor takes values; the class holds the sentence."""

from __future__ import annotations

from collections.abc import Sequence

from ..base_error import ShardfuseError, shown


class UntranslatableError(ShardfuseError):
    """A node of a graph that no op of shardfuse stands for: its region ends there, or stays Inductor's.

    Nobody but the pass sees it; its sentence is the reason in the report.
    """

    def __init__(self, what: str, found: object, expected: str) -> None:
        super().__init__(f"{what} is {shown(found)}, expected {expected}")


class CompileOptionError(ShardfuseError):
    """An option of ``backend="shardfuse"`` is unknown, or has a value that it cannot have."""

    def __init__(self, option: str, found: object, expected: Sequence[object]) -> None:
        known = ", ".join(map(repr, expected))
        super().__init__(f"torch.compile option {option!r} is {shown(found)}, expected one of {known}: correct it")


class UnknownOptionError(ShardfuseError):
    """An option of ``backend="shardfuse"`` that there is not."""

    def __init__(self, option: str, known: Sequence[str]) -> None:
        super().__init__(f"torch.compile has no option {option!r}, expected {' or '.join(known)}: correct it")


class GroupSizeError(ShardfuseError):
    """A compiled graph was made for another number of ranks than its process group has."""

    def __init__(self, collective: str, expected: int, found: int) -> None:
        super().__init__(
            f"a compiled region has {collective} over {expected} ranks, and its process group has {found}: compile the "
            "model where the group has as many, and clear torch.compile's caches (TORCHINDUCTOR_CACHE_DIR)"
        )


class OutputShapeError(ShardfuseError):
    """The program of a region gave an output another shape than the graph of torch.compile says.  Nothing read it."""

    def __init__(self, place: int, found: Sequence[int], expected: Sequence[int | None], text: str) -> None:
        super().__init__(
            f"output {place} of a compiled region has the shape {list(found)}, and its graph says {list(expected)}: "
            'compile with options={"shardfuse.take": "none"}, and report the program, which begins '
            f"{text[:80]!r}"
        )


class ProgramTextError(ShardfuseError):
    """The text of a region in generated code is not one that a definition prints."""

    def __init__(self, text: str, where: str, what: str) -> None:
        super().__init__(
            f"the program of a compiled region cannot be read, {where}: {what}; if it comes from a cache of "
            f"torch.compile, clear that cache (TORCHINDUCTOR_CACHE_DIR).  The text begins {text[:80]!r}"
        )
