"""Make the small pickled checkpoints that the tests read: `python tools/make_pickle_fixture.py [directory]`.

Needs torch and safetensors. `whole` has one `pytorch_model.bin`, `sharded` two and an index, `same` the same weights as
safetensors; `odd.bin` holds views, shared storages and parameters.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
LAYER = {
    "input_layernorm": (16,),
    "post_attention_layernorm": (16,),
    "self_attn.q_proj": (16, 16),
    "self_attn.k_proj": (8, 16),
    "self_attn.v_proj": (8, 16),
    "self_attn.o_proj": (16, 16),
    "mlp.gate_proj": (24, 16),
    "mlp.up_proj": (24, 16),
    "mlp.down_proj": (16, 24),
}


def main(out):
    torch.manual_seed(0)
    shapes = {"model.embed_tokens.weight": (32, 16), "model.norm.weight": (16,)}
    shapes |= {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in LAYER.items()}
    values = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    for name in ("whole", "sharded", "same"):
        (out / name).mkdir(parents=True, exist_ok=True)
        (out / name / "config.json").write_text(json.dumps(CONFIG) + "\n")
    torch.save(values, out / "whole" / "pytorch_model.bin")
    save_file(values, out / "same" / "model.safetensors")
    names = sorted(values)
    shards = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for shard, members in shards.items():
        torch.save({name: values[name] for name in members}, out / "sharded" / shard)
    index = {"weight_map": {name: shard for shard, members in shards.items() for name in members}}
    (out / "sharded" / "pytorch_model.bin.index.json").write_text(json.dumps(index) + "\n")
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    module = torch.nn.Linear(3, 2)
    odd = {
        "base": base,
        "transposed": base.T,
        "part": base[1:3, ::2],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.zeros(0, 3, dtype=torch.float16),
        "flags": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.float64)),
        **module.state_dict(prefix="linear."),
    }
    torch.save(odd, out / "odd.bin")
    torch.save(module.state_dict(), out / "module.bin")
    (out / "versions.json").write_text(json.dumps({"torch": torch.__version__}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "tests/fixtures/pickled"))
