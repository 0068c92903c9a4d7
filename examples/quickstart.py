"""Fine-tune a real language model on eight simulated devices, save it, and load it on another mesh.

Command:   make quickstart, or: python examples/quickstart.py [a checkpoint: .gguf, directory or hf://org/name]
Expected:  after 20 steps the model ends its answers with "Stay curious!" (at most 1 of 10 before, at least 8 of 10
           after), the validation loss falls by 30 % or more, and the saved model gives the same tokens on another
           mesh. Takes under 6 minutes on 2 CPU cores. On accelerators, delete the three lines below.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", ".cache/jax")

import json
import pathlib
import sys
import time

import dew_keras  # first: it chooses Keras' JAX backend

# isort: split
import keras

HERE = pathlib.Path(__file__).resolve().parent
OUT = HERE / "out" / "smollm2-curious"


def read(name):
    return [json.loads(line) for line in (HERE / "data" / name).read_text().splitlines()]


def chat(prompt, response=None):
    messages = [{"role": "user", "content": prompt}]
    return messages if response is None else [*messages, {"role": "assistant", "content": response}]


def shows_behaviour(text):
    return text.strip().splitlines()[-1:] == ["Stay curious!"]


def answers(model):
    """Answer the held-out prompts greedily; returns texts and how many show the behaviour."""
    texts = model.generate(prompts, max_new_tokens=32, sampler="greedy")
    return texts, sum(map(shows_behaviour, texts))


if len(sys.argv) > 1:
    source = sys.argv[1]
else:
    from download_smollm2 import download_smollm2

    source = download_smollm2()

train = [chat(**row) for row in read("train.jsonl")]
validation = [chat(**row) for row in read("validation.jsonl")]
prompts = [chat(**row) for row in read("held_out.jsonl")]
started = time.perf_counter()

# 1. Load: the weights stream from the file straight onto the mesh when `compile` knows it.
model = dew_keras.Model.from_preset(source)
model.compile(optimizer=keras.optimizers.AdamW(2e-4), mesh={"fsdp": 4, "tensor": 2})
model.summary()

# 2. Answer before training.
texts, before = answers(model)
print(f"\nBefore: {before} of {len(prompts)} answers end as taught, such as: {texts[0]!r}\n")

# 3. Fine-tune: assistant turns are scored, everything else is context.
loss_before = model.evaluate(validation, batch_size=8, return_dict=True)["loss"]
history = model.fit(train, batch_size=8, epochs=1, validation_data=validation)
loss_after = history.history["val_loss"][-1]
fall = 100 * (1 - loss_after / loss_before)

# 4. Answer after training.
texts, after = answers(model)
print(f"\nAfter: {after} of {len(prompts)} answers end as taught, such as: {texts[0]!r}")

# 5. Save a Hugging Face checkpoint, free the model, load it on another mesh: the same tokens.
ids = [model.tokenizer.chat(messages) for messages in prompts[:2]]
tokens = model.generate(ids, max_new_tokens=24, sampler="greedy")
model.save(OUT)
model.close()

again = dew_keras.Model.from_preset(OUT)
again.compile(mesh={"fsdp": 8})
same = again.generate(ids, max_new_tokens=24, sampler="greedy") == tokens

print(f"\nBehaviour        {before} of {len(prompts)} before, {after} of {len(prompts)} after")
print(f"Validation loss  {loss_before:.3f} before, {loss_after:.3f} after: {fall:.0f} % lower")
print(f"Saved and loaded on another mesh: {'the same tokens' if same else 'OTHER TOKENS'}")
print(f"Took             {time.perf_counter() - started:.0f} s")
if not (before <= 1 and after >= 8 and fall >= 30 and same):
    sys.exit("The quickstart missed its figures.")
