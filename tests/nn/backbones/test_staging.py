"""Which stacks divide into stages: what does not is refused by name, before anything is traced."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

from dew.nn.mlp import MlpSpec
from dew.objectives.base import Ratio
from dew.objectives.language import LanguageModel
from dew.parallel.stages import microbatched_into
from dew.placement.layout import LayoutRefused
from dew.placement.mesh import MeshSpec, build_mesh
from dew.training.loss_scale import dynamic_loss_scale
from dew.training.optimizer import make_optimizer
from dew.training.step import update_step
from dew.training.trainer import Trainer
from tests.tiny import tiny_batch, tiny_decoder, tiny_layer

LOCAL, WHOLE = tiny_layer(window=4), tiny_layer()
WIDE = dataclasses.replace(WHOLE, mlp=MlpSpec(features=96))


@pytest.mark.parametrize(
    "fields, stages, text",
    [
        ({"num_layers": 6}, 4, r"stage=4 does not divide the model's 6 layers. Use stage=2 or 3 or 6\."),
        (
            {"layers": (LOCAL, WHOLE) * 3},
            2,
            r"stage=2 does not divide the model's 3 repeats of a pattern of 2 layers. Use stage=3\.",
        ),
        (
            {"layers": (WIDE,) * 2 + (WHOLE,) * 6},
            2,
            r"8 layers, in runs of 2, 6 alike, repeat no pattern: layers 0 and 4, 4 apart .*, differ in mlp\.",
        ),
        (
            {"layers": (LOCAL, LOCAL, WHOLE, WIDE)},
            2,
            r"4 layers, in runs of 2, 1, 1 alike.*layers 0 and 2, 2 apart as in 2 stages, differ in mixer\.",
        ),
        ({"layers": (LOCAL, WHOLE) * 10 + (LOCAL,)}, 2, r"1, 1, \.\.\. alike, repeat no pattern\. Use stage=1"),
        ({"layers": ()}, 2, r"stage=2 does not divide the model's 0 layers. Use stage=1"),
        (
            {"num_layers": 8, "bank_layers": 2},
            2,
            r"splits banks of 8 layers.* bank_layers=2 cuts them. Use bank_layers=8 or more, or None",
        ),
        ({"layers": (LOCAL, WHOLE) * 4, "bank_layers": 2}, 2, r"splits banks of 4 layers.* Use bank_layers=4 or more"),
        ({"num_layers": 4, "scan_layers": False}, 2, r"scan_layers=False stores each layer on its own"),
    ],
)
def test_a_stack_that_does_not_divide_is_refused(fields, stages, text):
    with pytest.raises(LayoutRefused, match=text):
        Trainer(LanguageModel(tiny_decoder(**fields)), "sgd", mesh=MeshSpec(stage=stages))


@pytest.mark.parametrize(
    "fields, stages",
    [
        ({"layers": (LOCAL, WHOLE) * 4}, (2, 4)),
        ({"layers": ((LOCAL,) * 5 + (WHOLE,)) * 2}, (2,)),
        ({"layers": ((WIDE,) * 2 + (WHOLE,) * 6) * 2}, (2,)),
        ({"num_layers": 4, "bank_layers": 4}, (2, 4)),
    ],
)
def test_a_pattern_that_repeats_in_every_stage_divides(fields, stages):
    for count in stages:
        tiny_decoder(**fields).check_stages(count)


def test_a_module_without_a_stack_is_refused():
    with pytest.raises(LayoutRefused, match="stage=2 pipelines a layer stack, and Dense has none"):
        Trainer(LanguageModel(nn.Dense(2)), "sgd", mesh=MeshSpec(stage=2))


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match=r"schedule must be 'gpipe' or '1f1b'\. Received: schedule='zigzag'"):
        tiny_decoder(schedule="zigzag")


@dataclasses.dataclass(frozen=True)
class Squares:
    """An objective with a loss of its own."""

    module: Any


@pytest.mark.parametrize("mesh", [MeshSpec(stage=2), {"stage": 2}])
def test_1f1b_is_refused_for_another_objective_and_in_float16_when_the_trainer_is_made(mesh):
    module = tiny_decoder(schedule="1f1b")
    text = r"trains with the token cross entropy.* Use schedule='gpipe' for another loss. Received: objective=Squares"
    with pytest.raises(ValueError, match=text):
        Trainer(Squares(module), "sgd", mesh=mesh)
    narrow = module.clone(dtype="float16")
    with pytest.raises(
        ValueError, match=r"a loss scale is known, which float16 needs. Use dtype='bfloat16' .*Received: dtype=float16"
    ):
        Trainer(LanguageModel(narrow), dynamic_loss_scale(optax.sgd(0.1)), mesh=mesh)
    Trainer(Squares(module.clone(schedule="gpipe")), "sgd", mesh=mesh)
    for allowed in (module, narrow):
        Trainer(LanguageModel(allowed), "sgd", mesh=MeshSpec(fsdp=2))


def test_a_step_of_your_own_trains_through_the_objective_under_1f1b_and_not_past_it():
    objective, optimizer = LanguageModel(tiny_decoder(schedule="1f1b", num_layers=2)), make_optimizer("sgd")

    def past(state, batch):
        loss = jnp.sum(objective.module.apply(state.variables, batch["inputs"], train=True))
        return state, {"loss": Ratio(loss, jnp.ones(()))}, jnp.ones((), bool)

    def lowered(step):
        return Trainer(objective, optimizer, mesh=MeshSpec(stage=2), step=step).lower(tiny_batch(rows=8))

    assert "while" in lowered(update_step(objective, optimizer)).as_text()
    with pytest.raises(ValueError, match=r"Use schedule='gpipe' for another loss. Received: a call with train=True"):
        lowered(past)


def test_1f1b_is_refused_for_another_loss_and_in_float16_where_a_module_is_called():
    module, tokens = tiny_decoder(schedule="1f1b"), jnp.zeros((8, 4), jnp.int32)
    variables = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    score = functools.partial(jax.eval_shape, functools.partial(module.apply, method="token_loss"), variables)
    with pytest.raises(
        ValueError, match=r"token_loss follows a pipeline's schedule\. .*stage=2 or more.*Received: .*stage=1"
    ):
        score(tokens, tokens, jnp.ones((8, 4)))
    with jax.set_mesh(build_mesh(MeshSpec(stage=2))):
        with pytest.raises(ValueError, match=r"loss='auto' of the facade, only.*Received: a call with train=True"):
            jax.eval_shape(functools.partial(module.apply, train=True), variables, tokens)
        narrow = functools.partial(module.clone(dtype="float16").apply, method="token_loss")
        with pytest.raises(ValueError, match=r"a loss scale is known, which float16 needs.*Received: dtype=float16"):
            jax.eval_shape(narrow, variables, tokens, tokens, jnp.ones((8, 4)))


def test_a_trainer_on_a_built_mesh_with_stages_is_told_its_microbatches():
    run, mesh = LanguageModel(tiny_decoder()), build_mesh(MeshSpec(stage=2))
    with pytest.raises(ValueError, match=r"stage=2 does not say how many microbatches"):
        Trainer(run, "sgd", mesh=mesh)
    assert Trainer(run, "sgd", mesh=mesh, microbatches=4).microbatches == 4


def test_microbatches_that_do_not_divide_the_rows_of_a_device_are_refused():
    # Two rows on each of 4 devices: 4 microbatches divide the batch, not what a device holds.
    trainer = Trainer(LanguageModel(tiny_decoder()), "sgd", mesh=MeshSpec(stage=2, microbatches=4))
    text = r"2 rows on each of the 4 row shards .*microbatches=4 of the pipeline \(stage=2\). Use a batch of 16 rows"
    with pytest.raises(ValueError, match=text):
        trainer.place_batch(tiny_batch(rows=8))


def test_rows_of_a_direct_call_that_do_not_divide_are_refused():
    module, mesh = tiny_decoder(), build_mesh(MeshSpec(stage=2))
    variables = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    with (
        jax.set_mesh(mesh),
        microbatched_into(4),
        pytest.raises(ValueError, match=r"microbatches=4 over 4 row shards .* multiple of 16 rows. Received: 8 rows"),
    ):
        jax.eval_shape(module.apply, variables, jnp.zeros((8, 4), jnp.int32))


def test_rows_must_still_divide_over_the_row_shards():
    trainer = Trainer(LanguageModel(tiny_decoder()), "sgd", mesh=MeshSpec(stage=2))
    with pytest.raises(ValueError, match=r"6 global rows, which do not divide over the 4 row shards.*Use a batch of 8"):
        trainer.place_batch(tiny_batch(rows=6))
