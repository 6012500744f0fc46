"""What README.md shows is what the repository holds and what it prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_is_the_file() -> None:
    source = (ROOT / "examples/sharded_norm.py").read_text().split('"""\n\n', 1)[1]
    assert source.rstrip() in README


def test_the_example_prints_what_readme_says() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    command = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    script = str(ROOT / "examples/sharded_norm.py")
    done = subprocess.run(
        [sys.executable, *command, script], capture_output=True, text=True, env=environment, timeout=120, check=True
    )
    printed = done.stdout.strip()
    # the difference from unsharded torch is the last digits of a sum, which another torch build may round otherwise
    first, rest = printed.split("\n", 1)
    # the example prints the largest difference of numbers below 8, of which 1e-5 is 10 roundings of float32
    assert float(first.rsplit(" ", 1)[1]) < 1e-5
    assert rest in README


def test_the_links_lead_somewhere() -> None:
    for part in README.split("](")[1:]:
        target = part.split(")")[0].partition("#")[0]
        assert (ROOT / target).exists(), target
