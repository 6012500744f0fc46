"""Changes of the code that `scripts/mutate.py` finds and that change no behaviour, each with the reason."""

from __future__ import annotations

EQUIVALENT: dict[tuple[str, str, str], str] = {}
"""By the file, the line of code (without the blanks around it) and what becomes of it, as the script prints it."""
