"""A tiny random checkpoint under the published model's name, so that documentation runs as written and offline.

Entry point: `publish`. It has the shape of a Llama checkpoint on the Hub: config, safetensors, tokenizer, template.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from dew.data.text import Tokenizer
from dew.nn.sharding import unboxed
from dew.pretrained import describe, save_pretrained

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
COMMIT = "0" * 40
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "dtype": "bfloat16",
}


def write_tokenizer(directory: pathlib.Path) -> None:
    """Write a byte-level tokenizer, one token per byte, with chat markers.

    Args:
        directory: An existing folder.
    """
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
        "model_max_length": 256,
        "tokenizer_class": "GPT2Tokenizer",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def write_checkpoint(directory: pathlib.Path) -> None:
    """Write the whole checkpoint directory.

    Args:
        directory: A folder that does not exist yet.
    """
    bare = directory.with_name(directory.name + ".config")
    bare.mkdir(parents=True)
    (bare / "config.json").write_text(json.dumps(CONFIG, indent=2))
    write_tokenizer(bare)
    described = describe(bare, dtype="float32")
    variables = unboxed(described.module.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32)))
    variables = jax.tree.map(np.asarray, variables)
    save_pretrained(
        directory, described.module, variables, config=described.config, tokenizer=Tokenizer.from_directory(bare)
    )
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))


def publish(hub: pathlib.Path) -> pathlib.Path:
    """Put the checkpoint into a Hub cache.

    Args:
        hub: Cache folder, as HF_HUB_CACHE names it.

    Returns:
        The snapshot's folder.
    """
    repository = hub / f"models--{NAME.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.parent.mkdir(parents=True)
    write_checkpoint(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot
