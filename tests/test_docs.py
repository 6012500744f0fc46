"""The pages of docs/: every Python block runs, every page is in the site, and what scripts write is up to date.

A page's blocks share one namespace and run in order.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import blocks_of

import shardfuse
from shardfuse.tools.doctor.variables import AROUND, READERS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *(ROOT / folder / "README.md" for folder in ("", "examples", "benchmarks"))])
FOLDERS = (ROOT, ROOT / "shardfuse", ROOT / "shardfuse/executor", ROOT / "shardfuse/compile", ROOT / "tests")
"""Where a file may be that a page names."""
RUN_ELSEWHERE = (ROOT / "examples/sharded_norm.py").read_text().split('"""\n\n', 1)[1].strip()
"""README.md's example, of which test_readme.py has the output as well."""


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def with_blocks() -> list[Path]:
    return [page for page in PAGES if "```python" in page.read_text()]


@pytest.mark.parametrize("page", with_blocks(), ids=named)
def test_the_blocks_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    names: dict[str, object] = {"__name__": "docs"}
    for block in blocks_of(text):
        if block.code.strip() == RUN_ELSEWHERE:
            continue
        # Blocks stand in the traceback under their own lines.
        code = compile("\n" * block.line + block.code, str(page), "exec")
        before = compile(block.before, f"{page}, before line {block.line}", "exec")

        def run(space: dict[str, object], before: object = before, code: object = code) -> None:
            exec(before, space)
            exec(code, space)

        if block.ranks:
            shardfuse.simulate(lambda run=run: run(dict(names)), block.ranks, timeout=120)
        else:
            run(names)
    if "\nIt prints" in text and page != ROOT / "README.md":
        shown = text.split("\nIt prints", 1)[1].split("```text\n", 1)[1].split("```", 1)[0]
        printed = capsys.readouterr().out
        for line in shown.splitlines():
            assert all(part in printed for part in line.split("...")), line


def test_every_page_is_in_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = set(re.findall(r"(\S+\.md)$", navigation, re.MULTILINE))
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target and " " not in target:
            assert (page.parent / target).exists(), target


def test_files_that_pages_name_exist() -> None:
    """Such as `executor/binding.py`: from the root, from shardfuse/, or a test by its name alone."""
    code = re.compile(r"`((?:[a-z0-9_]+/)*[a-z0-9_]+\.(?:py|sh|c|json))`")
    missing = {
        f"{named(page)}: {path}"
        for page in PAGES
        for path in code.findall(page.read_text())
        if not any((folder / path).exists() for folder in (page.parent, *FOLDERS))
    }
    assert not missing


def test_every_variable_is_on_the_page_of_settings() -> None:
    page = (DOCS / "settings.md").read_text()
    assert not [name for name in (*READERS, *AROUND) if f"`{name}`" not in page]


def test_the_table_of_errors_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts/troubleshooting.py"), "--check"]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
