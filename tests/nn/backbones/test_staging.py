"""Which stacks divide into stages: what does not is refused by name, before anything is traced."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from dew.objectives.language import LanguageModel
from dew.parallel.stages import microbatched_into
from dew.placement.layout import LayoutRefused
from dew.placement.mesh import MeshSpec, build_mesh
from dew.training.trainer import Trainer
from tests.tiny import tiny_batch, tiny_decoder, tiny_layer

LOCAL, WHOLE = tiny_layer(window=4), tiny_layer()


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
            {"layers": (LOCAL, LOCAL, WHOLE, WHOLE)},
            2,
            r"stage=2 needs 4 layers whose pattern repeats in every stage.* 2 loops, over the layers 0_1, 2_3 \(",
        ),
        ({"num_layers": 4, "bank_layers": 2}, 2, r"These are 2 loops.*no bound bank_layers"),
        ({"num_layers": 4, "scan_layers": False}, 2, r"scan_layers=False stores each layer on its own"),
    ],
)
def test_a_stack_that_does_not_divide_is_refused(fields, stages, text):
    trainer = Trainer(LanguageModel(tiny_decoder(**fields)), "sgd", mesh=MeshSpec(stage=stages))
    with pytest.raises(LayoutRefused, match=text):
        trainer.place()


def test_a_pattern_that_repeats_in_every_stage_divides():
    for stages in (2, 4):
        tiny_decoder(layers=(LOCAL, WHOLE) * 4).check_stages(stages)


def test_a_module_without_a_stack_is_refused():
    trainer = Trainer(LanguageModel(nn.Dense(2)), "sgd", mesh=MeshSpec(stage=2))
    with pytest.raises(LayoutRefused, match="stage=2 pipelines a layer stack, and Dense has none"):
        _ = trainer.mesh


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match=r"schedule must be 'gpipe' or '1f1b'\. Received: schedule='zigzag'"):
        tiny_decoder(schedule="zigzag")


def test_1f1b_is_refused_for_another_loss_and_in_float16():
    module, tokens = tiny_decoder(schedule="1f1b"), jnp.zeros((8, 4), jnp.int32)
    variables = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    score = functools.partial(jax.eval_shape, functools.partial(module.apply, method="token_loss"), variables)
    with pytest.raises(ValueError, match=r"token_loss follows a pipeline's schedule; the mesh in context has stage=1"):
        score(tokens, tokens, jnp.ones((8, 4)))
    with jax.set_mesh(build_mesh(MeshSpec(stage=2))):
        with pytest.raises(ValueError, match=r"trains with the token cross entropy of LanguageModel only"):
            jax.eval_shape(functools.partial(module.apply, train=True), variables, tokens)
        narrow = functools.partial(module.clone(dtype="float16").apply, method="token_loss")
        with pytest.raises(ValueError, match=r"a loss scale is known, which float16 needs. Use dtype"):
            jax.eval_shape(narrow, variables, tokens, tokens, jnp.ones((8, 4)))


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
