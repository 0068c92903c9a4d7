"""Print what each known family is held to, with measured figures: `python -m tools.parity_table [--only llama glm4]`.

The rows are those of docs/loading.md. The largest difference is that of the logits from the reference library's, of
the largest logit, over the family's fixtures, whole rows and cached decoding; the tests hold it to their tolerance.
"""

import argparse
import inspect
import json
import re

import numpy as np

from dew.pretrained.families import FAMILIES
from tests.pretrained.checkpoints import FIXTURES, NAMES
from tests.pretrained.test_parity import MESHED, decoded, difference, loaded, logits

HEADER = ("`model_type`", "config class", "tested how", "special", "largest difference seen")


def fixtures() -> dict[str, list[str]]:
    """Family to the fixtures that the parity tests load."""
    found: dict[str, list[str]] = {}
    for name in NAMES:
        found.setdefault(json.loads((FIXTURES / name / "config.json").read_text())["model_type"], []).append(name)
    return {model_type: found[model_type] for model_type in FAMILIES}


def described(model_type: str, names: list[str]) -> list[str]:
    """What the code and the tests state about a family: all columns but the last."""
    translate = FAMILIES[model_type].translate
    config_class = re.search(r"`(\w+Config)`", translate.__doc__ or "")
    module = inspect.getmodule(translate)
    assert config_class is not None, f"translate of {model_type} names its config class"
    assert module is not None
    assert module.__doc__ is not None
    meshes = sum(name in names for name, _ in MESHED)
    tested = ", ".join(f"`{name}`" for name in names) + ", whole and cached"
    if meshes:
        tested += f"; {meshes} {'mesh' if meshes == 1 else 'meshes'}"
    special = module.__doc__.splitlines()[0].rstrip(".")
    return [f"`{model_type}`", f"`{config_class[1]}`", tested, special]


def largest_difference(names: list[str]) -> float:
    """Measure the fixtures of a family."""
    largest = 0.0
    for name in names:
        reference = np.load(FIXTURES / name / "reference.npz")
        tokens, want = reference["tokens"], reference["logits"]
        model = loaded(name)
        for compute in (logits, decoded):
            largest = max(largest, float(difference(compute(model.module, model.variables, tokens), want)))
    return largest


def line(cells: tuple[str, ...] | list[str]) -> str:
    """Write a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=list(FAMILIES), default=list(FAMILIES), metavar="MODEL_TYPE")
    asked = parser.parse_args().only
    print(line(HEADER))
    print(line(["---"] * len(HEADER)))
    for model_type, names in fixtures().items():
        if model_type in asked:
            print(line([*described(model_type, names), f"{largest_difference(names):.1e}"]), flush=True)


if __name__ == "__main__":
    main()
