"""The short scripts of examples/ from outside: each runs, compares itself with torch, and says what it finds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_ranks import Server, rank_variables

ROOT = Path(__file__).parent.parent
DISTANCE = r".* differs? from .*float64 torch.* by [\d.]+e-0[67] \(eager .*float32: [\d.]+e-0[67]\)"
PRINTED = {
    "unet_block": (
        2,
        r"UNet block, forward and backward, \[2, 64, 32, 32\], 16 rows a rank, on 2 x cpu",
        DISTANCE,
        r"[\d.]+ ms",
    ),
    # on one rank: on two it would be compiled twice
    "vision_transformer": (
        1,
        r"vision transformer.* on 1 x cpu",
        r".* ([1-9]\d*) of \1 regions",
        DISTANCE,
        r".* images/s",
    ),
    # the forward's all-reduces behind `out` and `down`, and the backward's in front of five column-parallel layers
    "decoder": (2, r".* on 2 x cpu", r".* ([1-9]\d*) of \1 regions, 7 all-reduces inside", DISTANCE, r".* tokens/s"),
    "generate": (2, r"4 sequences of 36 tokens on 2 x cpu: ranks exchange by coll.*", DISTANCE, r"[\d,]+ tokens/s"),
    "nvfuser_mlp": (2, r".* 512 of 1024 hidden columns a rank, on 2 x cpu", DISTANCE, r"[\d,]+ us a call"),
}
"""Of each script the number of ranks, and the lines that the first of them prints."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The process that ranks are forked from: importing what they need takes seconds."""
    server = Server(Path(__file__).with_name("example_ranks.py"))
    yield server
    server.close()


def run(server: Server, folder: Path, ranks: int, *arguments: str) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each rank."""
    # Graphs are compiled by the rank itself: a process more would import torch again.
    alike = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    running = [server.start(arguments, {**own, **alike}, folder) for own in rank_variables(ranks)]
    return [(rank.wait(200), rank.output.read_text(), rank.errors.read_text()) for rank in running]


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
def test_an_example_is_right_and_says_so(server: Server, name: str, tmp_path: Path) -> None:
    ranks, *lines = PRINTED[name]
    (code, output, errors), *others = run(server, tmp_path, ranks, name)
    assert (code, errors) == (0, "")
    assert others == [(0, "", "")] * (ranks - 1)
    printed = output.splitlines()
    for line, pattern in zip(printed, lines, strict=True):
        assert re.fullmatch(pattern, line), line


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_fails_where_what_it_got_is_wrong(server: Server, name: str, tmp_path: Path) -> None:
    ((code, output, errors),) = run(server, tmp_path, 1, name, "falsified")
    assert (code, output) == (1, ""), errors
    assert re.search(r"AssertionError: off by [\d.]+e-0[34], eager torch by [\d.]+e-0[67]\n", errors), errors


def test_every_example_is_listed() -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert set(re.findall(r"^\| `(\w+\.py)` \|", page, re.MULTILINE)) == scripts
    own = {
        "train_lm.py",
        "lm_model.py",
        "lm_data.py",
        "lm_run.py",
        "sharded_norm.py",
    }  # test_train_lm.py, test_readme.py
    assert {f"{name}.py" for name in PRINTED} == scripts - own
