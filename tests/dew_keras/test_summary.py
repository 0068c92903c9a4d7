"""What `summary` prints of a mesh that splits positions is what `fit` runs."""

import re

import numpy as np
import pytest

import dew_keras
from dew.parallel import exchange
from dew_keras.feeding import Feeder
from tests.dew_keras.texts import tiny_tokenizer
from tests.tiny import tiny_decoder, tiny_layer

TEXTS = ["hello there, hello", "abc"] * 2


def summary_lines(model):
    said = []
    model.summary(print_fn=said.append)
    return re.findall(r"exchange of .*", said[0])


def test_an_exchange_and_a_kernel_that_are_named_are_taken_and_told():
    model = dew_keras.Model(tiny_decoder(num_layers=2))
    model.compile("sgd", mesh={"sequence": 4}, sequence_impl="ring", attention_impl="xla")
    (line,) = summary_lines(model)
    assert "of 64 tokens: ring, " in line
    assert "(named by sequence_impl; " in line
    assert (model.module.sequence_impl, model.module.attention_impl) == ("ring", "xla")
    model.compile("sgd", mesh={"sequence": 4})
    assert "of 64 tokens: all_to_all, " in summary_lines(model)[0]


@pytest.mark.parametrize(
    "layer, mesh, length, want",
    [
        # A chunk within documents reaches as a window does, further than the chunk of whole rows.
        ({"chunk": 32}, {"sequence": 4}, None, "chunk 32 in documents or padded: all_to_all"),
        # Slices of 4 are shorter than the reach of 8, which slices of the context are not.
        ({"window": 9}, {"sequence": 4}, 16, "of 16 tokens, window 9: all_to_all"),
        ({"window": 9}, {"sequence": 4}, None, "of 64 tokens, window 9: banded"),
    ],
)
def test_the_line_of_a_layer_is_what_fit_on_texts_traces(layer, mesh, length, want, monkeypatch):
    model = dew_keras.Model(tiny_decoder(layers=(tiny_layer(**layer),) * 2, vocab_size=259), tiny_tokenizer())
    model.compile("sgd", mesh=mesh, sequence_length=length)
    line = next(line for line in summary_lines(model) if want in line)
    if length is None:
        # The summary takes the context where texts say the length.
        model.compile("sgd", mesh=mesh, sequence_length=64)
    traced = []

    def recorded(*arguments, **options):
        traced.append(choose(*arguments, **options))
        return traced[-1]

    choose = exchange.choose_exchange
    monkeypatch.setattr(exchange, "choose_exchange", recorded)
    engine = model._engine
    source, _, _ = Feeder(engine, model.tokenizer, engine.compiled).training(
        TEXTS, None, None, None, batch_size=2, shuffle=False, split=0.0
    )
    batch = {name: np.repeat(array, 2, axis=0) for name, array in source.example().items()}
    engine.trainer(batch).lower(batch)
    assert {str(choice) for choice in traced} == {line.partition(": ")[2]}
