"""One line of the report: what was looked at, how it is, what was found, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from ...errors import ShardfuseError

Status = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Finding:
    """``status``: a fault keeps programs from running, or from running right; a warning costs time or a feature.

    ``area``: the heading that it stands under.  ``remedy``: what to do, "" where it is ok.
    """

    area: str
    name: str
    status: Status
    found: str
    remedy: str = ""


def ok(area: str, name: str, found: str) -> Finding:
    return Finding(area, name, "ok", found)


def checked(area: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """What ``check`` finds; a check that fails itself is a fault, so that the others are still made."""
    found: list[Finding] = []
    try:
        for finding in check():
            found.append(finding)  # noqa: PERF402 what was found before a failure stays
    except ShardfuseError as error:
        found.append(Finding(area, "check", "fault", str(error), "do what the message says"))
    except Exception as error:  # noqa: BLE001 whatever it is, it is reported
        remedy = "report it with this whole text: the check itself is broken, or the installation is"
        found.append(Finding(area, "check", "fault", f"ended with {type(error).__name__}: {error}", remedy))
    return found
