"""A bounded cache that drops what was used longest ago."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """At most ``capacity`` entries; of these the half used last is sure to stay.

    Two generations, so that a key that is found again costs one look: what is used goes to the young one, and when
    that holds half of the capacity it is the old one's turn to be dropped.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        found = self._young.get(key)
        if found is None and self._old:
            found = self._old.get(key)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: K, value: V) -> None:
        if key not in self._young and len(self._young) >= max(self.capacity // 2, 1):
            self._old, self._young = self._young, {}
        self._young[key] = value
        self._old.pop(key, None)

    def __len__(self) -> int:
        return len(self._young) + len(self._old)
