"""Functions that kernels call: a kernel's file has each behind those that it calls, and runs by itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import shardfuse
from shardfuse.kernel_functions import texts_of

FOLDER = Path(shardfuse.__file__).parent / "kernel_functions"


def defined(file: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((FOLDER / file).read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


GPU = {**defined("gpu_functions.py"), **defined("word_functions.py"), **defined("random_functions.py")}
INTERPRETED = defined("interpreted_functions.py")


@pytest.mark.parametrize("interpret", [False, True])
def test_a_function_comes_behind_all_that_it_calls(interpret: bool) -> None:
    for name in {**GPU, **(INTERPRETED if interpret else {})}:
        texts = texts_of(name, interpret=interpret)
        assert list(texts)[-1] == name
        known = {"tl", "triton", "float"}
        for called, text in texts.items():
            (function,) = ast.parse(text).body
            assert isinstance(function, ast.FunctionDef)
            assert function.name == called
            own = {a.arg for a in function.args.args}
            own |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            read = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
            assert read <= own | known, (name, called)
            known.add(called)


def test_the_interpreter_has_functions_without_assembly() -> None:
    assert "inline_asm" in texts_of("exp", interpret=False)["exp"]
    for name in INTERPRETED:
        assert "inline_asm" not in "".join(texts_of(name, interpret=True).values()), name
