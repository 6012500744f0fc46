"""A schedule as plain data, for a file or another rank, and back."""

from __future__ import annotations

from typing import cast, get_args, get_type_hints

from .schedule import Access, Group, Schedule, ScheduleError, Split
from .schedule_parts import Exchange, Launch, Order, Residency

_KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (Schedule, *get_args(Order), *get_args(Residency), Group, *get_args(Exchange), Split, Launch)
}
_KIND, _ACCESS = "kind", "access"


def record_of(value: object) -> object:
    """``value``, a schedule or a part of one: of each part its kind and its fields."""
    if isinstance(value, Access):
        return {_KIND: _ACCESS, "value": value.value}
    if type(value).__name__ not in _KINDS:
        return value
    return {_KIND: type(value).__name__, **{name: record_of(part) for name, part in vars(value).items()}}


def schedule_of(record: object) -> Schedule | None:
    """The schedule of a record that names each field of each part; ``None`` for one that no kernel can follow."""
    try:
        found = _value_of(record)
    except (ScheduleError, TypeError, ValueError):
        return None
    return found if isinstance(found, Schedule) else None


def _value_of(record: object) -> object:
    """Raises ValueError, TypeError."""
    if not isinstance(record, dict):
        return record
    named = dict(cast("dict[str, object]", record))
    kind = named.pop(_KIND, None)
    if kind == _ACCESS:
        return Access(named.get("value"))
    made = _KINDS.get(str(kind))
    own = get_type_hints(made) if made else {}
    values = {name: _value_of(value) for name, value in named.items()}
    if made is None or values.keys() != own.keys():
        raise ValueError(f"{kind} is no part of a schedule, or lacks a field")
    wrong = next(
        (name for name, value in values.items() if type(value) not in (get_args(own[name]) or (own[name],))), ""
    )
    if wrong:
        raise TypeError(f"{wrong} of {kind} is {values[wrong]!r}")
    return made(**values)
