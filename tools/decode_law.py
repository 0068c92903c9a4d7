"""The law of generation between steps: on every factorisation of 8 devices, training goes on as if it had not been.

Run `python -m tools.decode_law` for all 56, with the options of `tools/mesh_law.py` for some. Through the facade: fit,
generate, fit leaves bit for bit what fit, fit does; tokens, greedy ones and drawn ones, are those of one device.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import dew_keras  # first: it chooses Keras' JAX backend

# isort: split
import jax
import keras
import numpy as np

from dew.objectives.language import LanguageModel
from dew.placement import MeshSpec, build_mesh
from dew.training.placing import plain
from dew.tree import named_leaves
from tools import mesh_law
from tools.law_table import chosen, judged, table_parser, tally
from tools.mesh_cases import Case, Factors, Features, Way, factorisations, kept_whole, ways

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
ANSWER: dict[str, Any] = {"max_new_tokens": 6, "stop_token_ids": []}
DRAWN: dict[str, Any] = {"sampler": "top_k", "seed": 5}


def features_on(factors: Factors) -> Features:
    """Choose what a decoder has that runs in every way: heads in groups, windows shorter than an answer, banks."""
    has = dict.fromkeys(("grouped", "windowed", "scanned"), True) | {"sparse": factors.expert > 1}
    return Features(**{field.name: has.get(field.name, False) for field in dataclasses.fields(Features)})


def decode_cases() -> list[Case]:
    """List every factorisation, each used in one way, another one on the next."""
    cases = []
    for number, factors in enumerate(factorisations()):
        open_ways = ways(factors)
        cases.append(Case(factors, open_ways[number % len(open_ways)], features_on(factors)))
    return sorted(cases, key=lambda case: (case.features, case.layers))  # like ones share one device's tokens


def model_of(case: Case) -> dew_keras.Model:
    """Build the model of a case."""
    return _model(case.features, case.layers, case.way, case.spec, 1.0 if kept_whole(case) else 0.0)


def _model(features: Features, layers: int, way: Way, mesh: Any, tolerance: float) -> dew_keras.Model:
    module = mesh_law.decoder(features, layers, way)
    shapes = plain(jax.eval_shape(LanguageModel(module).init, jax.random.key(0)))
    model = dew_keras.Model(module, variables=mesh_law.initial_values(shapes, features))
    # A large epsilon: Adam divides by the gradient's own size, which would magnify rounding where that is near 0.
    optimizer = keras.optimizers.Adam(0.05, epsilon=1e-2)
    model.compile(optimizer, mesh=mesh, layout=mesh_law.layout(features, tolerance))
    return model


def fit(model: dew_keras.Model, features: Features, seed: int) -> None:
    """Train a model on one batch."""
    model.fit(mesh_law.batch(features, seed), batch_size=mesh_law.ROWS, verbose=0)


def answers(model: dew_keras.Model) -> dict[str, list[list[int]]]:
    """Give the greedy tokens and the drawn ones."""
    return {"greedy": model.generate(PROMPTS, **ANSWER), "drawn": model.generate(PROMPTS, **DRAWN, **ANSWER)}


@functools.cache
def one_device(features: Features, layers: int) -> dict[str, list[list[int]]]:
    """Give the answers of one device after one fit."""
    model = _model(features, layers, Way(), build_mesh(MeshSpec(), jax.devices()[:1]), 0.0)
    fit(model, features, 0)
    return answers(model)


def held(model: dew_keras.Model) -> dict[str, tuple[np.ndarray, Any]]:
    """Give the values and places of all that training holds: weights, optimizer, counters."""
    return {path: (np.array(leaf), leaf.sharding) for path, leaf in named_leaves(model._engine.state).items()}


def differing(got: dict[str, tuple[np.ndarray, Any]], want: dict[str, tuple[np.ndarray, Any]]) -> list[str]:
    """Name what is not in both, elsewhere, or other than bit for bit the same."""
    both = got.keys() & want.keys()
    same = {path for path in both if got[path][1] == want[path][1] and np.array_equal(got[path][0], want[path][0])}
    return sorted((got.keys() | want.keys()) - same)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found of a case.

    Attributes:
        words: What was compared.
        defects: What differs.
        seconds: Time it took.
    """

    words: str
    defects: list[str]
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether the law holds."""
        return not self.defects


def judge(case: Case) -> Verdict:
    """Fit, generate and fit, beside a model that fits twice, and beside one device's tokens."""
    start = time.perf_counter()
    want = one_device(case.features, case.layers)
    model, other = model_of(case), model_of(case)
    for one in (model, other):
        fit(one, case.features, 0)
    before = held(model)
    got = answers(model)
    defects = [f"{name} tokens {got[name]}, not {want[name]}" for name in want if got[name] != want[name]]
    defects += [f"not as before generate: {path}" for path in differing(held(model), before)]
    for one in (model, other):
        fit(one, case.features, 1)
    defects += [f"not as after fit and fit: {path}" for path in differing(held(model), held(other))]
    tokens = sum(len(row) for rows in want.values() for row in rows)
    words = f"{tokens} tokens, {len(before)} arrays"
    return Verdict(words=words, defects=defects, seconds=time.perf_counter() - start)


def report(case: Case) -> str:
    """Run a case and print a line: it "holds" or "FAILS"."""
    verdict = judged(case, judge)
    return "holds" if verdict is not None and verdict.holds else "FAILS"


def main(arguments: list[str] | None = None) -> int:
    """Print a line per case and what fails; the exit status is 1 if anything does, 2 if nothing is asked for."""
    states = [report(case) for case in chosen(table_parser(__doc__), arguments, lambda _: decode_cases())]
    print(tally(states))
    return int("FAILS" in states)


if __name__ == "__main__":
    raise SystemExit(main())
