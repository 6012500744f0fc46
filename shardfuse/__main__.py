"""``python -m shardfuse doctor``, and ``shardfuse doctor`` where it is installed."""

from __future__ import annotations

import argparse
import sys

from shardfuse.config import VERSION
from shardfuse.tools.doctor import run_doctor


def main(arguments: list[str] | None = None) -> int:
    """Run the command that ``arguments``, or else the command line, name; returns the exit code."""
    parser = argparse.ArgumentParser(prog="shardfuse", description="Commands around sharded fusions.")
    parser.add_argument("--version", action="version", version=VERSION)
    parser.add_argument("command", choices=["doctor"], help="doctor: look at this machine and try what it can run")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    return run_doctor(asked.rest)


if __name__ == "__main__":
    sys.exit(main())
