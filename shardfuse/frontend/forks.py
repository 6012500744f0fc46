"""Executors forget their programs in a forked process, so that a call costs no look at whether it is in one."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Forgetful(Protocol):
    """What has to be made anew in a forked process."""

    def forget(self) -> None: ...


_known: WeakSet[Forgetful] = WeakSet()


def forgotten_in_forks(executor: Forgetful) -> None:
    """Have ``executor`` forget in every process that is forked from this one."""
    _known.add(executor)


def _forget() -> None:
    for executor in list(_known):
        executor.forget()


os.register_at_fork(after_in_child=_forget)
