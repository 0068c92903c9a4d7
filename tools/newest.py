"""Run a named part of the tests on the newest Python and JAX this machine can install: `make newest`.

The default interpreter may be too old for the newest JAX. Looks for a newer supported one, makes `.venv-newest` once,
and runs `SUBSET` there. Prints the reason and succeeds where there is nothing newer.
"""

import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv-newest"
MINORS = (13, 12)  # newest first; each has a file in constraints/
# Where JAX's own interfaces are used directly: meshes, shardings, kernels, compiled steps, checkpoints, the cache.
SUBSET = (
    "tests/placement",
    "tests/kernels",
    "tests/parallel/test_exchange.py",
    "tests/parallel/test_expert_exchange.py",
    "tests/parallel/test_one_f_one_b.py",
    "tests/parallel/test_scan_slices.py",
    "tests/parallel/test_vocabulary.py",
    "tests/nn/test_sharding.py",
    "tests/training/test_loop.py",
    "tests/training/test_mesh_law.py::test_windows_of_two_batches_train_as_on_one_device",
    "tests/checkpoint",
    "tests/inference/test_decode.py::test_greedy_is_the_full_forward_repeated",
    "tests/inference/test_decode_mesh.py",
)
# Every test of the subset, with two of its cases: a release of JAX changes what it compiles, not the laws.
PYTEST = ("--ends", "--quiet", "--numprocesses", "auto", "--maxprocesses", "8", "--dist", "worksteal")


def candidates(minor: int) -> list[str]:
    """List where Python 3.`minor` may be: on the path, then in pyenv's folder."""
    found = [shutil.which(f"python3.{minor}")]
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv")) / "versions"
    found += [str(path) for path in sorted(pyenv.glob(f"3.{minor}.*/bin/python"))]
    return [path for path in found if path]


def runs(python: str, minor: int) -> bool:
    """Say whether an executable is the Python it is named after (a shim may refuse to run)."""
    code = f"import sys, venv; sys.exit(sys.version_info[:2] != (3, {minor}))"
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


def newer_python() -> tuple[str, int] | None:
    """Find the newest supported interpreter above the running one.

    Returns:
        Its path and minor version, or None.
    """
    for minor in MINORS:
        if minor <= sys.version_info[1]:
            return None
        for python in candidates(minor):
            if runs(python, minor):
                return python, minor
    return None


def install(python: str, minor: int) -> pathlib.Path:
    """Make the environment, unless it is there and newer than the pins.

    Args:
        python: Interpreter to make it from.
        minor: Its minor version.

    Returns:
        Path of the environment's interpreter.
    """
    inside, stamp = FOLDER / "bin" / "python", FOLDER / f".installed-3{minor}"
    constraints = ROOT / "constraints" / f"py3{minor}.txt"
    sources = (constraints, ROOT / "pyproject.toml")
    if stamp.exists() and all(stamp.stat().st_mtime >= source.stat().st_mtime for source in sources):
        return inside
    subprocess.run([python, "-m", "venv", "--clear", str(FOLDER)], check=True)
    pip = [str(inside), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--constraint", str(constraints), "--editable", f"{ROOT}[test]"], check=True)
    stamp.touch()
    return inside


def main() -> int:
    """Run the subset on the newest interpreter found.

    Returns:
        pytest's exit status, or 0 where there is nothing newer than the running interpreter.
    """
    found = newer_python()
    if found is None:
        version = ".".join(map(str, sys.version_info[:2]))
        print(f"newest JAX skipped: no supported Python newer than {version} found")
        return 0
    inside = install(*found)
    code = "import jax, sys; print('Python', sys.version.split()[0], 'with JAX', jax.__version__)"
    subprocess.run([str(inside), "-c", code], check=True)
    return subprocess.run([str(inside), "-m", "pytest", *PYTEST, *SUBSET], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
