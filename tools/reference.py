"""Install torch and transformers for the live comparisons, where that is cheap: `make reference`.

Cheap means that pip would take a torch without accelerator libraries, which are gigabytes. Otherwise the reason is
printed and nothing changes: the tests marked `reference` then skip.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints" / "py{}{}.txt".format(*sys.version_info[:2])
STAMP = pathlib.Path(sys.prefix) / ".installed-reference"
PIP = (sys.executable, "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS))


def is_fresh(stamp: pathlib.Path) -> bool:
    """Say whether the stamp is newer than what it depends on."""
    sources = (CONSTRAINTS, ROOT / "pyproject.toml")
    return stamp.exists() and all(stamp.stat().st_mtime >= source.stat().st_mtime for source in sources)


def reason_against(wanted: list[str]) -> str | None:
    """Ask pip what an installation would bring.

    Args:
        wanted: Requirement strings of the `reference` extra.

    Returns:
        Why it should not be done, or None.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        run = subprocess.run(
            [*PIP, "--dry-run", "--report", str(report), *wanted], capture_output=True, text=True, check=False
        )
        if run.returncode:
            return f"pip cannot resolve them here: {run.stderr.strip().splitlines()[-1]}"
        names = [item["metadata"]["name"] for item in json.loads(report.read_text())["install"]]
    heavy = sorted(name for name in names if name.startswith(("nvidia-", "cuda-")))
    return f"they would bring {len(heavy)} accelerator packages ({heavy[0]}, ...)" if heavy else None


def install() -> str:
    """Install the `reference` extra into this environment.

    Returns:
        Why it was not done, empty where it was.
    """
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = extras["reference"]
    if reason := reason_against(wanted):
        return reason
    if subprocess.run([*PIP, *wanted], check=False).returncode:
        return "pip could not install them"
    return ""


def main() -> None:
    """Install the reference libraries once, or print why they are not here."""
    if not is_fresh(STAMP):
        STAMP.write_text(install())
    if reason := STAMP.read_text():
        print(f"reference libraries skipped: {reason} (remove {STAMP.name} from the environment to ask again)")


if __name__ == "__main__":
    main()
