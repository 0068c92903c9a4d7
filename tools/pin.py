"""Write the pinned versions for one Python minor: `make pins PYTHON=python3.12`.

Asks pip what a fresh environment with every extra would hold, and writes `constraints/py312.txt`: names and versions,
no index, no hashes, so that the file works with any registry.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
EXTRAS = ("docs", "gguf", "plot", "quantization", "reference", "test", "tfds")
# Their versions follow the accelerator build of the package that asks for them.
UNPINNED = re.compile(r"^(nvidia-|cuda-|triton$|libtpu)")
# The newest torch whose CPU build every supported Python can install; the newest soupsieve for 3.11.0 to 3.11.4.
FIXED = {"torch": "2.13.0", "soupsieve": "2.10"}
HEADER = "# Pinned for Python {}.{} by `make pins`. Names and versions only: any registry serves them.\n"


def requirements() -> list[str]:
    """List what the project and its extras ask for.

    Returns:
        Requirement strings, without those that name the project itself.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in EXTRAS:
        wanted += project["optional-dependencies"][extra]
    wanted += [f"{name}=={version}" for name, version in FIXED.items()]
    return [name for name in wanted if not name.startswith("dew[")]


def resolve(wanted: list[str]) -> dict[str, str]:
    """Ask pip for the versions that satisfy all requirements together.

    Args:
        wanted: Requirement strings.

    Returns:
        Version by canonical distribution name, build labels such as `+cpu` removed.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*command, "--report", str(report), *wanted], check=True)
        found = json.loads(report.read_text())["install"]
    versions = {}
    for item in found:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        if not UNPINNED.match(name):
            versions[name] = item["metadata"]["version"].split("+")[0]
    return dict(sorted(versions.items()))


def main() -> None:
    """Resolve for the running interpreter and write its constraints file."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    major, minor = sys.version_info[:2]
    target = ROOT / "constraints" / f"py{major}{minor}.txt"
    lines = [f"{name}=={version}\n" for name, version in resolve(requirements()).items()]
    target.write_text(HEADER.format(major, minor) + "".join(lines))
    print(f"{target.relative_to(ROOT)}: {len(lines)} packages")


if __name__ == "__main__":
    main()
