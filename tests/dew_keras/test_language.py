"""Language models through Keras' verbs: one loss for any batch, mesh or accumulation, and text in, text out."""

import gc
import math
import re
import shutil

import flax.linen as nn
import jax
import keras
import numpy as np
import pytest

import dew_keras
from dew.placement.memory import live_bytes_per_device
from dew.placement.mesh import MeshSpec, build_mesh
from dew.tree import named_leaves
from tests.dew_keras.nets import StillFirst, assert_same_logs, one_device, refused
from tests.dew_keras.texts import tiny_language_module, tiny_tokenizer
from tests.tiny import tiny_batch, tiny_decoder

# Every matrix of the tiny model counts; its norms, which tensor never splits, do not.
SPLIT_ALL = dew_keras.Layout(min_shard=512, tolerance=0)
CHATS = [
    [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    for question, answer in [("hi", "hello"), ("who?", "me"), ("what?", "a test"), ("why", "why not")]
]


def language_model(mesh=None, seed=0, **arguments):
    model = dew_keras.Model(tiny_language_module(), tiny_tokenizer(), seed=seed)
    arguments = {"optimizer": keras.optimizers.SGD(0.1), **arguments}
    model.compile(mesh={"fsdp": 4, "tensor": 2} if mesh is None else mesh, layout=SPLIT_ALL, **arguments)
    return model


@pytest.fixture(scope="module")
def trained():
    """One model that was trained and that tests may train on, for those that need no fresh weights."""
    model = language_model(optimizer=keras.optimizers.SGD(0.05), sequence_length=16)
    model.fit(tiny_batch(rows=4), batch_size=4, verbose=0)
    return model


def assert_loss_of_the_logits(logs, model, batch):
    """Compare loss and perplexity with one mean over the scored tokens, in double precision."""
    logits = model.predict(batch["tokens"][:, :-1], verbose=0).astype(np.float64)
    scores = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    picked = np.take_along_axis(scores, batch["tokens"][:, 1:, None], axis=-1)[..., 0]
    mask = batch["loss_mask"][:, 1:]
    loss = -(picked * mask).sum() / mask.sum()
    assert logs["loss"] == pytest.approx(loss, rel=1e-6)
    assert logs["perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)


def test_one_loss_and_one_perplexity_for_every_batch_size_and_mesh():
    batch = tiny_batch(rows=7, length=12, seed=3)
    for mesh in ({"data": 8}, {"fsdp": 2, "tensor": 2}):
        model = language_model(mesh)
        for batch_size in (1, 2, 3, 4, 7):
            logs = model.evaluate(batch, batch_size=batch_size, verbose=0, return_dict=True)
            assert_loss_of_the_logits(logs, model, batch)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("devices", [1, 4])
def test_fit_logs_one_loss_and_one_perplexity_for_every_batch_size_accumulation_and_data_axis(devices, accumulation):
    batch = tiny_batch(rows=7, length=12, seed=3)
    model = dew_keras.Model(tiny_decoder(num_layers=1))
    mesh = build_mesh(MeshSpec(), jax.devices()[:devices])
    model.compile(keras.optimizers.SGD(0.0), mesh=mesh, accumulation=accumulation)
    for batch_size in (1, 2, 3, 4):
        history = model.fit(batch, batch_size=batch_size, verbose=0).history
        assert_loss_of_the_logits({name: values[0] for name, values in history.items()}, model, batch)


def test_accumulation_is_one_batch_of_all_rows():
    batch = tiny_batch(rows=8, length=12, seed=4)
    whole, parts = language_model(), language_model(accumulation=2)
    want = whole.fit(batch, batch_size=8, epochs=2, verbose=0, shuffle=False).history
    got = parts.fit(batch, batch_size=4, epochs=2, verbose=0, shuffle=False).history
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-5)
    for ours, theirs in zip(parts.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_8_bit_products_are_chosen_at_compile_and_undone_by_the_next():
    batch, model = tiny_batch(rows=8, length=12, seed=4), language_model()
    losses = {}
    for quantization in (None, "int8", None):
        model.compile(mesh=model.mesh, layout=SPLIT_ALL, quantization=quantization)
        losses.setdefault(quantization, []).append(model.evaluate(batch, verbose=0)[0])
    assert losses[None][0] == losses[None][1] != losses["int8"][0]
    assert losses["int8"] == pytest.approx(losses[None][:1], rel=1e-2)


def test_every_mesh_trains_as_one_device_does_and_really_splits():
    batch = tiny_batch(rows=10, length=12, seed=5)
    histories = []
    for mesh in (one_device(), {"data": 8}, {"tensor": 2, "fsdp": 2}):
        model = language_model(mesh)
        arguments = {"validation_data": batch, "callbacks": [StillFirst(0.1)]}
        histories.append(model.fit(batch, batch_size=4, epochs=2, verbose=0, **arguments).history)
        used = [axis for axis in ("fsdp", "tensor") if model.mesh.shape[axis] > 1]
        for path, leaf in named_leaves(model.variables).items():
            if leaf.size >= 1024 and leaf.ndim > 1:
                for axis in used:
                    assert axis in str(leaf.sharding.spec), (path, leaf.sharding.spec)
    for history in histories[1:]:
        assert_same_logs(history, histories[0], still=1)


FORMS = {
    "texts": ["hello there", "a b c", "what is it?"],
    "prompts": {"prompts": ["hi ", "who "], "responses": ["there", "me"]},
    "chats": CHATS,
    "rows": tiny_batch(rows=4, length=16)["tokens"],
    "dict": tiny_batch(rows=4, length=16),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_input_trains_and_evaluates(form, trained, capsys):
    inputs = FORMS[form]
    history = trained.fit(inputs, batch_size=4, epochs=2, validation_data=inputs).history
    assert history["loss"][1] < history["loss"][0]
    first = capsys.readouterr().out.splitlines()[0]
    said = r"fit: \d documents in \d rows, sequence length 16, packing off, no tokens cut off, \d+ scored tokens"
    assert re.fullmatch(said, first)
    assert trained.evaluate(inputs, batch_size=4, verbose=0)[0] == pytest.approx(history["val_loss"][1], rel=1e-6)


def test_the_first_line_of_fit_tells_what_was_cut(trained, capsys):
    trained.fit(["hello there, hello", "abc"], batch_size=4, epochs=1)
    first = capsys.readouterr().out.splitlines()[0]
    assert "sequence length 16" in first
    assert "2 tokens cut off 1 documents" in first


def test_batches_come_from_iterables_and_generators():
    batch = tiny_batch(rows=8)
    starts = []

    def stream():
        for start in (0, 4):
            starts.append(start)
            yield {name: value[start : start + 4] for name, value in batch.items()}

    class Again:
        def __iter__(self):
            return stream()

    model = language_model()
    start = model.evaluate(batch, batch_size=4, verbose=0)[0]
    assert model.evaluate(Again(), verbose=0)[0] == pytest.approx(start, rel=1e-6)
    history = model.fit(Again(), epochs=2, verbose=0).history["loss"]
    assert len(history) == 2
    assert starts == [0, 4] * 3
    with pytest.raises(ValueError, match=r"spent.*steps_per_epoch"):
        model.fit(stream(), epochs=2, verbose=0)


def test_a_keras_loss_on_logits_trains_a_language_model():
    batch = tiny_batch(rows=8, seed=2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    model = language_model(loss=loss, weighted_metrics=["sparse_categorical_accuracy"])
    model.build(batch["tokens"])
    logits = model.predict(batch["tokens"][:, :-1], verbose=0)
    mask = batch["loss_mask"][:, 1:]
    scores = np.take_along_axis(np.asarray(nn.log_softmax(logits)), batch["tokens"][:, 1:, None], axis=-1)[..., 0]
    want = -(scores * mask).sum() / mask.sum()
    got = model.evaluate(batch, batch_size=8, verbose=0, return_dict=True)
    assert got["loss"] == pytest.approx(want, rel=1e-5)
    assert model.fit(batch, batch_size=8, epochs=2, verbose=0).history["loss"][1] < want


def test_generate_returns_the_kind_it_is_given():
    model = dew_keras.Model(tiny_language_module(), tiny_tokenizer())
    arguments = {"max_new_tokens": 3, "stop_token_ids": []}
    assert isinstance(model.generate("hi", **arguments), str)
    assert model.generate("hi", **arguments).startswith("hi")
    texts = model.generate(["hi", "hello"], **arguments)
    assert texts[0] == model.generate("hi", **arguments)
    assert model.generate("hi", strip_prompt=True, **arguments) == texts[0][2:]
    ids = model.generate([[5, 6], [7, 8, 9]], **arguments)
    assert [len(row) for row in ids] == [5, 6]
    assert isinstance(model.generate(CHATS[0][:1], **arguments), str)
    assert len(model.generate([chat[:1] for chat in CHATS], **arguments)) == 4
    assert not model.compiled, "generate works before compile"


def test_generated_tokens_do_not_depend_on_the_mesh_and_follow_the_seed():
    meshes = ({"data": 8}, {"fsdp": 4, "tensor": 2})
    greedy = [language_model(mesh).generate([[5, 6, 7]], max_new_tokens=6, stop_token_ids=[]) for mesh in meshes]
    assert greedy[0] == greedy[1]
    model = language_model(sampler="random")
    draw = {"max_new_tokens": 12, "stop_token_ids": []}
    assert model.generate([[5]], seed=3, **draw) == model.generate([[5]], seed=3, **draw)
    assert model.generate([[5]], seed=3, **draw) != model.generate([[5]], seed=4, **draw)
    assert model.generate([[5]], **draw) != model.generate([[5]], **draw)


def test_max_length_counts_prompt_and_answer(trained):
    assert len(trained.generate([[5, 6, 7]], 8, [])[0]) == 8
    with pytest.raises(ValueError, match="not both"):
        trained.generate([[5]], 8, max_new_tokens=2)
    with pytest.raises(ValueError, match="context"):
        trained.generate([[5] * 65], max_new_tokens=1)


def test_masters_and_moments_are_made_by_the_first_fit_only():
    model = dew_keras.Model(tiny_language_module(dtype="bfloat16", param_dtype="bfloat16"), tiny_tokenizer())
    model.compile(mesh={"fsdp": 8}, layout=SPLIT_ALL)
    batch = tiny_batch(rows=8)
    model.evaluate(batch, verbose=0)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.variables)} == {"bfloat16"}
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.variables))
    gc.collect()  # what earlier tests left must not be freed between the two readings
    before = sum(live_bytes_per_device().values())
    model.fit(batch, batch_size=8, verbose=0)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.variables)} == {"float32"}
    # Masters take the place of the bfloat16 weights, twice as large; two moments come beside them.
    assert sum(live_bytes_per_device().values()) - before > 4 * weights


def test_summary_says_what_each_axis_splits_and_what_it_costs(capsys):
    model = dew_keras.Model(tiny_language_module(), tiny_tokenizer())
    model.compile(mesh={"fsdp": 4, "tensor": 2}, layout=SPLIT_ALL)
    model.summary()
    out = capsys.readouterr().out
    assert "fsdp=4 splits" in out
    assert re.search(r"tensor=2 splits .*mlp, self_attn", out)
    assert re.search(r"kB per device of .* kB", out)
    lines = []
    model.summary(print_fn=lines.append, expand_nested=True)
    assert "mlp/gate_proj/kernel" in lines[0]


def test_a_high_rate_on_pretrained_weights_warns():
    model = dew_keras.Model.from_preset("tests/fixtures/llama")
    with pytest.warns(UserWarning, match="0.01 is high for pretrained weights"):
        model.compile(optimizer=keras.optimizers.Adam(0.01))
    model.compile()
    assert float(model.optimizer.learning_rate.value) == pytest.approx(2e-5)


def test_a_preset_costs_nothing_until_a_mesh_is_known(tmp_path):
    tokenizer = tiny_tokenizer()
    model = dew_keras.Model.from_preset("tests/fixtures/qwen3", tokenizer=tokenizer)
    assert model.tokenizer is tokenizer
    assert model.variables is None
    model.compile(mesh={"fsdp": 8}, layout=SPLIT_ALL)
    assert all(leaf.sharding.mesh == model.mesh for leaf in jax.tree.leaves(model.variables))
    tokens = model.generate([[5, 6, 7, 8]], max_new_tokens=8, stop_token_ids=[])
    model.save(tmp_path / "out")
    again = dew_keras.Model.from_preset(tmp_path / "out")
    again.compile(mesh={"data": 4, "tensor": 2}, layout=SPLIT_ALL)
    assert again.generate([[5, 6, 7, 8]], max_new_tokens=8, stop_token_ids=[]) == tokens


def test_what_save_cannot_write_is_refused(tmp_path):
    model = language_model()
    with pytest.raises(ValueError, match="Hugging Face directory"):
        model.save(tmp_path / "model.h5")
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        model.save(tmp_path / "there", overwrite=False)


def test_weights_files_hold_one_entry_per_layer_and_load_into_other_storage(tmp_path):
    model = language_model()
    model.save_weights(tmp_path / "a.weights.h5")
    apart = dew_keras.Model(tiny_language_module(scan_layers=False), seed=5)
    apart.load_weights(tmp_path / "a.weights.h5")
    ids = [[5, 6, 7]]
    assert apart.generate(ids, max_new_tokens=6, stop_token_ids=[]) == model.generate(
        ids, max_new_tokens=6, stop_token_ids=[]
    )
    with pytest.raises(ValueError, match=r"must end in `\.weights\.h5`"):
        model.save_weights(tmp_path / "a.h5")
    with pytest.raises(FileNotFoundError, match="no file"):
        model.load_weights(tmp_path / "b.weights.h5")


def test_another_accumulation_starts_a_new_window():
    batch = tiny_batch(rows=8, length=12, seed=4)
    model = language_model(accumulation=3)
    model.fit(batch, batch_size=2, verbose=0, shuffle=False)  # one batch of the second window stays open
    fresh = language_model(accumulation=2)
    fresh.set_weights(model.get_weights())
    model.compile(optimizer=model.optimizer, mesh={"fsdp": 4, "tensor": 2}, layout=SPLIT_ALL, accumulation=2)
    got = model.fit(batch, batch_size=2, epochs=2, verbose=0, shuffle=False).history["loss"]
    want = fresh.fit(batch, batch_size=2, epochs=2, verbose=0, shuffle=False).history["loss"]
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert got[1] < got[0]


def test_variables_given_to_a_model_are_not_consumed_by_training():
    first = language_model()
    before = first.evaluate(tiny_batch(), verbose=0)
    second = dew_keras.Model(tiny_language_module(), variables=first.variables)
    second.compile(mesh={"fsdp": 4, "tensor": 2}, layout=SPLIT_ALL)
    second.fit(tiny_batch(), verbose=0)
    assert first.evaluate(tiny_batch(), verbose=0) == before


def test_a_data_set_of_token_rows_trains_as_the_rows_do():
    batch = tiny_batch(rows=8)
    parts = [{name: value[at : at + 4] for name, value in batch.items()} for at in (0, 4)]

    class Rows(keras.utils.PyDataset):
        def __len__(self):
            return len(parts)

        def __getitem__(self, index):
            return parts[index]

    model = language_model()
    want = model.evaluate(batch, batch_size=4, verbose=0)
    for data in (Rows(), parts, [(part,) for part in parts]):
        assert model.evaluate(data, verbose=0) == pytest.approx(want, rel=1e-6)
    assert model.evaluate((batch,), batch_size=4, verbose=0) == pytest.approx(want, rel=1e-6)


TOKENS = tiny_batch(rows=4)["tokens"]


@pytest.mark.parametrize(
    "x, y, text",
    [
        ([], None, "There is no data"),
        (None, None, "Received: NoneType"),
        (TOKENS.astype("float32"), None, "Token rows are integers.*dtype=float32"),
        (TOKENS[:, :, None], None, r"Token rows are integers of shape \[rows, T \+ 1\]"),
        (TOKENS.tolist(), None, "A batch for a language model is texts.*of type list"),
        ([b"abc"], None, "A batch for a language model is texts.*of type bytes"),
        ({"prompt": ["a"], "responses": ["b"]}, None, "holds 'prompts' and 'responses'"),
        ({"prompts": "ab", "responses": "cd"}, None, "'prompts' is a list of texts"),
        (TOKENS, TOKENS, "leave y out"),
    ],
)
def test_data_a_language_model_cannot_read_is_refused_with_the_forms_it_reads(trained, x, y, text):
    for verb in (trained.fit, trained.evaluate):
        with refused(trained, text, (ValueError, TypeError)):
            verb(x, y, verbose=0)


@pytest.mark.parametrize(
    "ids, text", [(TOKENS + 64, r"must lie in \[0, 64\)"), (np.ones((1, 65), np.int32), "context of 64")]
)
def test_predict_refuses_ids_and_lengths_the_model_does_not_have(trained, ids, text):
    with pytest.raises(ValueError, match=text):
        trained.predict(ids, verbose=0)


def test_a_closed_model_is_not_begun_anew():
    model = language_model()
    closes = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: model.close())
    with pytest.raises(RuntimeError, match=r"close\(\) cannot be called from a callback"):
        model.fit(tiny_batch(), verbose=0, callbacks=[closes])
    model.close()
    fit, generate = (lambda: model.fit(tiny_batch(), verbose=0)), (lambda: model.generate([[5]], max_new_tokens=2))
    for use in (fit, generate, model.compile):
        with pytest.raises(RuntimeError, match=r"close\(\) freed the weights"):
            use()


def test_a_checkpoint_that_cannot_be_read_leaves_the_model_uncompiled(tmp_path):
    shutil.copytree("tests/fixtures/llama", tmp_path / "llama")
    file = tmp_path / "llama" / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    model = dew_keras.Model.from_preset(tmp_path / "llama")
    with pytest.raises(ValueError, match="truncated or damaged"):
        model.compile(mesh={"fsdp": 8}, layout=SPLIT_ALL)
    assert not model.compiled
    assert model.mesh.shape["data"] == 8
    file.write_bytes(whole)
    model.compile(mesh={"fsdp": 8}, layout=SPLIT_ALL)
    assert model.built


def test_a_damaged_weights_file_is_named(tmp_path, trained):
    path = tmp_path / "a.weights.h5"
    trained.save_weights(path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"a\.weights\.h5 is damaged"):
        trained.load_weights(path)
