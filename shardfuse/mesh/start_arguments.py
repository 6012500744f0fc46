"""Arguments of `initialize()`: those that are out of range, and those that contradict the world that there is."""

from __future__ import annotations

from shardfuse.start_errors import InitializeArgumentError, ReinitializedError


def check_range(timeout: object, exchange_memory: object) -> None:
    """Raises InitializeArgumentError; None is what is left out."""
    is_time = isinstance(timeout, int | float) and not isinstance(timeout, bool) and 0 < timeout < float("inf")
    if timeout is not None and not is_time:
        raise InitializeArgumentError("timeout", timeout, "a positive number of seconds")
    is_memory = isinstance(exchange_memory, int) and not isinstance(exchange_memory, bool) and exchange_memory > 0
    if exchange_memory is not None and not is_memory:
        raise InitializeArgumentError("exchange_memory", exchange_memory, "a whole number of MB, 1 or more")


def check_same(**asked: tuple[object, object]) -> None:
    """Raises ReinitializedError; of each argument what is asked for, None where it is left out, and what the world
    has."""
    for argument, (given, first) in asked.items():
        if given is not None and given != first:
            raise ReinitializedError(argument, given, first)
