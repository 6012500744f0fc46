"""Programs of one launch that wait for each other, by a count in global memory that only grows."""

from __future__ import annotations

_ARRIVE = '''@triton.jit
def arrive(ptr):
    """Come: how many have, ever, this program among them."""
    tl.debug_barrier()
    return tl.atomic_add(ptr, 1, sem="acq_rel") + 1
'''
_WAIT = '''@triton.jit
def wait_for(ptr, come, count):
    """Wait until ``count`` have come, of whom ``come`` had: one thread asks, for all."""
    while (come - count).to(tl.int32) < 0:
        come = tl.atomic_add(ptr, 0, sem="acquire")
'''
_WAIT_BOUNDED = '''@triton.jit
def wait_for(ptr, come, count):
    """Wait until ``count`` have come, of whom ``come`` had: one thread asks, for all, and gives up in the end."""
    turns = 0
    while ((come - count).to(tl.int32) < 0) & (turns < {turns}):
        come = tl.atomic_add(ptr, 0, sem="acquire")
        turns += 1
'''
_MEET = '''@triton.jit
def meet(ptr, count):
    """Come, and wait until ``count`` have."""
    wait_for(ptr, arrive(ptr), count)
'''
_MEET_ALL = '''@triton.jit
def meet_all(ptr):
    """Come, and wait until every program of this launch has: each launch adds as many to the count."""
    come = arrive(ptr)
    programs = tl.num_programs(0)
    wait_for(ptr, come, (come + programs - 1) // programs * programs)
    tl.debug_barrier()
'''
_IS_LAST = '''@triton.jit
def is_last(ptr, programs):
    """Come: the last of so many?  Each launch adds as many to the count."""
    come = arrive(ptr)
    tl.debug_barrier()
    return come % programs == 0
'''

IS_LAST = {"arrive": _ARRIVE, "is_last": _IS_LAST}
MEET_ALL = {"arrive": _ARRIVE, "wait_for": _WAIT, "meet_all": _MEET_ALL}
"""Functions of a kernel's file, by name."""


def meet(turns: int | None) -> dict[str, str]:
    """The function ``meet`` and those that it calls.  ``turns``: polls after which a program gives up, for tests."""
    wait = _WAIT_BOUNDED.format(turns=turns) if turns else _WAIT
    return {"arrive": _ARRIVE, "wait_for": wait, "meet": _MEET}
