"""Triton functions that kernels call, and what stands for CUDA's math library under Triton's interpreter.

A kernel's file runs if pasted: codegen copies the text of each function that it calls into it.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_HEAD = "@triton.jit\ndef "
_DOCSTRING = re.compile(r'"""(?:.|\n)*?"""')
_CALL = re.compile(r"(?<![\w.])(\w+)\(")


def texts_of(name: str, *, interpret: bool) -> dict[str, str]:
    """The text of the function ``name``, behind those of the functions that it calls, by their names."""
    return {n: _library(interpret)[n] for n in _closure(name, interpret)}


@cache
def _closure(name: str, interpret: bool) -> tuple[str, ...]:
    library = _library(interpret)
    called = [n for n in _CALL.findall(_DOCSTRING.sub("", library[name])) if n in library and n != name]
    return tuple(dict.fromkeys([*(k for n in called for k in _closure(n, interpret)), name]))


@cache
def _library(interpret: bool) -> dict[str, str]:
    """Every function's text, by its name."""
    folder = Path(__file__).parent
    files = ["gpu_functions.py", "word_functions.py", "random_functions.py", "sums_in_pairs.py"]
    files += ["interpreted_functions.py"] if interpret else []
    found: dict[str, str] = {}
    for file in files:
        for text in (folder / file).read_text().split("\n\n\n"):
            if (start := text.find(_HEAD)) >= 0:
                found[text[start + len(_HEAD) : text.index("(", start)]] = text[start:].rstrip() + "\n"
    return found
