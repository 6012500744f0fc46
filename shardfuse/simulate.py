"""``python -m shardfuse.simulate -n 8 script.py [arguments]``: a sharded script on threads of one process, on a CPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import TextIO, cast

from shardfuse.errors import ShardfuseError
from shardfuse.tools.simulation import simulate


def main(arguments: list[str]) -> int:
    """Run the script as every rank. The exit code is 0, or 1 where a rank raises a ShardfuseError, which is printed."""
    parser = argparse.ArgumentParser(prog="python -m shardfuse.simulate", description=__doc__)
    parser.add_argument("-n", "--ranks", type=int, default=8, help="number of ranks (8)")
    parser.add_argument("--timeout", type=float, help="seconds for the whole run (no limit)")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script finds in sys.argv")
    asked = parser.parse_args(arguments)
    path = Path(asked.script)
    code = compile(path.read_text(), str(path), "exec")
    sys.argv = [asked.script, *asked.arguments]
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        simulate(run_as_main, asked.ranks, args=(code, asked.script), timeout=asked.timeout)
    except ShardfuseError as error:
        print(f"shardfuse: {error} ({'; '.join(getattr(error, '__notes__', []))})", file=cast(TextIO, sys.stderr))
        return 1
    return 0


def run_as_main(code: CodeType, path: str) -> None:
    """The script in a module of its own for this rank. ``sys.exit(0)`` ends the rank, not the others."""
    module = ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    try:
        exec(code, module.__dict__)
    except SystemExit as end:
        if end.code not in (0, None):
            raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
else:
    # `shardfuse.simulate` is the function; the import of a module would put the module in its place.
    sys.modules[__name__] = cast(ModuleType, simulate)
