"""Tiny random configs of every family, by the name of its fixture: what `tools/make_fixtures.py` makes.

Entry point: `FIXTURES`, a model class and the fields of its config.
"""

from transformers import (
    BambaForCausalLM,
    Cohere2ForCausalLM,
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    GemmaForCausalLM,
    Glm4ForCausalLM,
    GPT2LMHeadModel,
    GPTNeoXForCausalLM,
    GptOssForCausalLM,
    GraniteForCausalLM,
    GraniteMoeForCausalLM,
    GraniteMoeHybridForCausalLM,
    LlamaForCausalLM,
    Mamba2ForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    Olmo2ForCausalLM,
    Olmo3ForCausalLM,
    Phi3ForCausalLM,
    Qwen2ForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    Qwen3NextForCausalLM,
    SmolLM3ForCausalLM,
    Starcoder2ForCausalLM,
)

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
# Smaller, for the families that came later; windows of 8 tokens hide most of a row of 48.
SMALL = SHAPE | {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
NARROW = {name: value for name, value in SMALL.items() if name != "head_dim"}
LAYER_NORMED = {name: value for name, value in NARROW.items() if name != "rms_norm_eps"}
OWN_KEYS = {name: value for name, value in LAYER_NORMED.items() if name != "num_key_value_heads"}
SPARSE = SMALL | {"intermediate_size": 16, "vocab_size": 64}
SPARSE_NARROW = NARROW | {"intermediate_size": 8, "vocab_size": 64}
WINDOWED = SMALL | {"sliding_window": 8, "query_pre_attn_scalar": 12}
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0},
}
PHI3_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.2],
    "long_factor": [1.5, 8.0],
}
NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}  # theirs lie outside the vocabulary
SCAN = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_expand": 1, "mamba_chunk_size": 16}
HYBRID = NARROW | SCAN | {"vocab_size": 64, "num_hidden_layers": 4}
# Few numbers: a latent of 12 and a shared key of 4, values of another width than keys, which each config says.
LATENT = {
    **LAYER_NORMED,
    **NO_TOKENS,
    "vocab_size": 64,
    "intermediate_size": 16,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-4,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "moe_intermediate_size": 6,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
}
LATENT_YARN = YARN | {"rope_theta": 100.0, "mscale": 1.2, "mscale_all_dim": 0.8}
DELTA = (
    NARROW
    | {"vocab_size": 64, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 16}
    | {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_num_value_heads": 4, "linear_value_head_dim": 6}
)
DELTA_ROPE = {"rope_type": "default", "rope_theta": 100.0}
DELTA_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8} | {
    "shared_expert_intermediate_size": 8
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
    "logits_scaling": 6.0,
    "tie_word_embeddings": True,
}
FOUR_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA3_KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
FIXTURES = {
    "llama": (LlamaForCausalLM, {**SHAPE, "tie_word_embeddings": True, "rope_parameters": PLAIN}),
    "llama_untied": (
        LlamaForCausalLM,
        {
            **SHAPE,
            "head_dim": 16,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": LLAMA3,
        },
    ),
    "qwen3": (Qwen3ForCausalLM, {**SHAPE, "head_dim": 16, "tie_word_embeddings": True, "rope_parameters": PLAIN}),
    "qwen3_untied": (Qwen3ForCausalLM, {**SHAPE, "head_dim": 8, "tie_word_embeddings": False, "rope_parameters": YARN}),
    "mistral": (
        MistralForCausalLM,
        {**SMALL, "sliding_window": 8, "tie_word_embeddings": False, "rope_parameters": PLAIN},
    ),
    "qwen2": (
        Qwen2ForCausalLM,
        {
            **NARROW,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
            "rope_parameters": PLAIN,
        },
    ),
    "gemma": (GemmaForCausalLM, {**SMALL, "rope_parameters": PLAIN}),
    "gemma2": (
        Gemma2ForCausalLM,
        {**WINDOWED, "attn_logit_softcapping": 12.0, "final_logit_softcapping": 2.0, "rope_parameters": PLAIN},
    ),
    "gemma3_text": (Gemma3ForCausalLM, {**WINDOWED, "layer_types": GEMMA3_KINDS, "rope_parameters": GEMMA3_ROPE}),
    "smollm3": (SmolLM3ForCausalLM, {**NARROW, **NO_TOKENS, "no_rope_layer_interval": 2, "rope_parameters": PLAIN}),
    "olmo2": (Olmo2ForCausalLM, {**NARROW, **NO_TOKENS, "rope_parameters": PLAIN}),
    "olmo3": (
        Olmo3ForCausalLM,
        {
            **NARROW,
            **NO_TOKENS,
            "sliding_window": 8,
            "layer_types": GEMMA3_KINDS,
            "rope_parameters": {"sliding_attention": PLAIN, "full_attention": YARN},
        },
    ),
    "granite": (GraniteForCausalLM, {**NARROW, **GRANITE, "rope_parameters": PLAIN}),
    "phi3": (
        Phi3ForCausalLM,
        {
            **NARROW,
            **NO_TOKENS,
            "sliding_window": 16,
            "original_max_position_embeddings": 16,
            "rope_parameters": PHI3_ROPE,
        },
    ),
    "gpt_neox": (
        GPTNeoXForCausalLM,
        {**OWN_KEYS, **NO_TOKENS, "layer_norm_eps": 1e-4, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
    ),
    "gpt2": (
        GPT2LMHeadModel,
        {
            "vocab_size": 96,
            "n_embd": 32,
            "n_inner": 40,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 64,
            "layer_norm_epsilon": 1e-4,
            "scale_attn_by_inverse_layer_idx": True,
            **NO_TOKENS,
        },
    ),
    "starcoder2": (
        Starcoder2ForCausalLM,
        {**LAYER_NORMED, **NO_TOKENS, "norm_epsilon": 1e-4, "sliding_window": 8, "rope_parameters": PLAIN},
    ),
    "cohere2": (
        Cohere2ForCausalLM,
        {
            **LAYER_NORMED,
            **NO_TOKENS,
            "layer_norm_eps": 1e-4,
            "logit_scale": 0.25,
            "sliding_window": 8,
            "layer_types": GEMMA3_KINDS,
            "rope_parameters": PLAIN,
        },
    ),
    "glm4": (Glm4ForCausalLM, {**SMALL, **NO_TOKENS, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}),
    "mixtral": (
        MixtralForCausalLM,
        {**SPARSE | {"intermediate_size": 8}, **FOUR_EXPERTS, "sliding_window": 8, "rope_parameters": PLAIN},
    ),
    "qwen2_moe": (
        Qwen2MoeForCausalLM,
        {
            **SPARSE_NARROW,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 16,
            "mlp_only_layers": [0],
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 3,
            "rope_parameters": PLAIN,
        },
    ),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        {
            **SPARSE,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 8,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "output_router_logits": True,
            "router_aux_loss_coef": 0.01,
            "rope_parameters": PLAIN,
        },
    ),
    "granitemoe": (
        GraniteMoeForCausalLM,
        {**SPARSE_NARROW, **NO_TOKENS, **FOUR_EXPERTS, **GRANITE, "rope_parameters": PLAIN},
    ),
    "gpt_oss": (
        GptOssForCausalLM,
        {
            **SPARSE | {"intermediate_size": 8},
            **FOUR_EXPERTS,
            "swiglu_limit": 1.5,
            "swiglu_alpha": 1.25,
            "sliding_window": 8,
            "rope_parameters": YARN | {"truncate": False, "rope_theta": 500.0, "beta_fast": 4.0},
        },
    ),
    "mamba2": (
        Mamba2ForCausalLM,
        {
            **NO_TOKENS,
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "state_size": 8,
            "use_bias": True,
            "use_conv_bias": False,
            "time_step_limit": (0.01, 0.5),
            "layer_norm_epsilon": 1e-4,
            "chunk_size": 16,
        },
    ),
    "bamba": (
        BambaForCausalLM,
        {
            **HYBRID | {"intermediate_size": 16},
            **NO_TOKENS,
            "mamba_n_groups": 1,
            "mamba_proj_bias": True,
            "attn_layer_indices": [2],
            "rope_parameters": PLAIN,
        },
    ),
    "granitemoehybrid": (
        GraniteMoeHybridForCausalLM,
        {
            **HYBRID,
            **NO_TOKENS,
            "mamba_n_groups": 2,
            "mamba_d_conv": 3,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "shared_intermediate_size": 16,
            "num_local_experts": 0,
            **GRANITE | {"residual_multiplier": 0.5},
        },
    ),
    "granitemoehybrid_experts": (
        GraniteMoeHybridForCausalLM,
        {
            **HYBRID | {"num_hidden_layers": 3, "intermediate_size": 8},
            **NO_TOKENS,
            "mamba_conv_bias": False,
            "layer_types": ["mamba", "attention", "mamba"],
            "position_embedding_type": "rope",
            "shared_intermediate_size": 16,
            **FOUR_EXPERTS,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.01,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v2": (
        DeepseekV2ForCausalLM,
        {
            **LATENT,
            "q_lora_rank": 16,
            "qk_nope_head_dim": 6,
            "v_head_dim": 8,
            "attention_bias": True,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "routed_scaling_factor": 4.0,
            "rope_parameters": LATENT_YARN,
        },
    ),
    "deepseek_v2_lite": (
        DeepseekV2ForCausalLM,
        {
            **LATENT | {"first_k_dense_replace": 2},
            "q_lora_rank": None,
            "qk_nope_head_dim": 6,
            "v_head_dim": 12,
            "mlp_bias": True,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": PLAIN,
        },
    ),
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        {
            **LATENT,
            "q_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 0,
            "rope_parameters": LATENT_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "qwen3_next": (
        Qwen3NextForCausalLM,
        {
            **DELTA,
            **DELTA_EXPERTS,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_only_layers": [0],
            "rope_parameters": DELTA_ROPE,
        },
    ),
    # Three heads to a key, another convolution, biases and a tied head, none of which Qwen3-Next's has.
    "qwen3_5_text": (
        Qwen3_5ForCausalLM,
        {
            **DELTA | {"linear_num_value_heads": 6, "linear_conv_kernel_dim": 3},
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": DELTA_ROPE,
        },
    ),
    "qwen3_5_moe_text": (
        Qwen3_5MoeForCausalLM,
        {
            **{name: value for name, value in DELTA.items() if name != "intermediate_size"}
            | {"linear_value_head_dim": 4},
            **DELTA_EXPERTS | {"moe_intermediate_size": 6},
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "output_router_logits": True,
            "router_aux_loss_coef": 0.01,
            "rope_parameters": DELTA_ROPE,
        },
    ),
}
