"""What a test hands on to processes that it starts as ranks."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path


def environment() -> dict[str, str]:
    """This process's, without what a launcher of its own has put there."""
    launcher = re.compile(r"(OMPI|PMIX|PRTE|PMI|SLURM|TORCHELASTIC)_|(LOCAL_|GROUP_|ROLE_|MASTER_|WORLD_|RANK)")
    env = {name: value for name, value in os.environ.items() if not launcher.match(name)}
    env["PYTHONPATH"] = str(Path(__file__).parents[1])
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    return env
