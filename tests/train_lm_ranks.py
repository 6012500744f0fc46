"""Ranks of examples/train_lm.py for test_train_lm.py, all forked from this process; "falsified" is a faulty model."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import train_lm
from forked_ranks import serve
from matplotlib import pyplot  # noqa: F401 imported once for all ranks

if __name__ == "__main__":
    arguments = serve()
    if arguments is not None:
        if arguments[0] == "falsified":
            arguments = arguments[1:]
            train = train_lm.train_step
            train_lm.train_step = lambda model, *rest: train(model, *rest) * (1.001 if hasattr(model, "mesh") else 1)
        sys.exit(train_lm.main(arguments))
