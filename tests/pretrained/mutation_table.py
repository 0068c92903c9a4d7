"""Which wrong fields and weights the parity of each family must show.

Entry point: `wrong_fields`.
"""

from tests.pretrained.checkpoints import UNTIED
from tests.pretrained.mutations import (
    another_alpha,
    another_eps_of_scans,
    any_group,
    attention_not_scaled_by_depth,
    balance_ignored,
    biases_dropped,
    clamped_a_tenth_later,
    decays_doubled,
    delta_corrections_and_decays_swapped,
    delta_decays_doubled,
    delta_keys_and_queries_swapped,
    delta_projections_grouped_by_key,
    delta_projections_not_grouped_by_key,
    delta_scales_dropped,
    delta_steps_not_shifted,
    delta_taps_reversed,
    delta_values_and_gates_swapped,
    each_head_normalised,
    eps_times_ten,
    expert_biases_dropped,
    expert_gates_swapped,
    experts_reversed,
    full_residuals,
    gate_and_values_swapped,
    gates_before_ups,
    gates_swapped,
    groups_by_their_best,
    head_norms_swapped,
    head_norms_without_their_one,
    heads_not_gated,
    keys_and_values_swapped,
    latent_scales_dropped,
    latents_of_another_eps,
    norms_in_front,
    norms_of_the_mean_square,
    norms_swapped,
    one_after_the_other,
    one_expert_more,
    outer_norms_swapped,
    positions_one_later,
    queries_and_gates_swapped,
    query_scales_dropped,
    scaled_by_the_head,
    scaled_by_the_value,
    scaled_by_the_width,
    scales_of_scans_dropped,
    scales_of_the_first_head,
    scales_without_their_one,
    scans_normalised_together,
    shared_gates_swapped,
    shared_key_swapped,
    shared_perceptron_dropped,
    shared_perceptron_ungated,
    sinks_dropped,
    skips_dropped,
    taps_reversed,
    tied_to_the_table,
    unbounded_attention,
    unbounded_logits,
    unbounded_steps,
    unclamped_experts,
    unscaled_attention,
    unscaled_embeddings,
    unscaled_experts,
    unscaled_logits,
    unsharpened_scale,
    weights_divided,
    weights_not_divided,
    window_one_longer,
    window_one_shorter,
    windows_everywhere,
    written_and_read_swapped,
)
from tests.pretrained.rotary_mutations import (
    bounds_truncated,
    halves_rotated,
    neighbours_rotated,
    one_base_for_all,
    rotary_everywhere,
    rotary_where_there_is_none,
    scaling_everywhere,
    short_factors,
    theta_times_ten,
    unscaled_rotary,
    unsharpened_rotary,
    whole_heads_rotated,
)

EXPERTS = [one_expert_more, expert_gates_swapped, experts_reversed]
EVERYWHERE = [theta_times_ten, eps_times_ten, norms_swapped, scaled_by_the_width]
SCANS = [
    *(written_and_read_swapped, gate_and_values_swapped, taps_reversed, skips_dropped, decays_doubled),
    *(scales_of_scans_dropped, another_eps_of_scans),
]
LATENTS = [
    *(halves_rotated, latent_scales_dropped, shared_key_swapped, latents_of_another_eps, scaled_by_the_value),
    *(expert_gates_swapped, experts_reversed, shared_perceptron_dropped, one_expert_more),
]
DELTAS = [
    *(delta_keys_and_queries_swapped, delta_values_and_gates_swapped, delta_corrections_and_decays_swapped),
    *(delta_taps_reversed, delta_decays_doubled, delta_steps_not_shifted, delta_scales_dropped, another_eps_of_scans),
    *(queries_and_gates_swapped, heads_not_gated, head_norms_without_their_one, scales_without_their_one),
    whole_heads_rotated,
]
OLMO = [norms_in_front, each_head_normalised, scales_of_the_first_head]
GEMMA = [unscaled_embeddings, scales_without_their_one]
MUTATIONS = {
    "llama_untied": [unscaled_rotary],
    "qwen3": [head_norms_swapped],
    "qwen3_untied": [unscaled_rotary],
    "mistral": [window_one_longer, window_one_shorter],
    "qwen2": [window_one_longer, windows_everywhere, biases_dropped],
    "gemma": GEMMA,
    "gemma2": [
        *GEMMA,
        unbounded_attention,
        unbounded_logits,
        windows_everywhere,
        window_one_shorter,
        outer_norms_swapped,
    ]
    + [scaled_by_the_head],
    "gemma3_text": [
        *GEMMA,
        one_base_for_all,
        unscaled_rotary,
        head_norms_swapped,
        window_one_longer,
        scaled_by_the_head,
    ],
    "smollm3": [rotary_everywhere],
    "olmo2": OLMO,
    "olmo3": [*OLMO, windows_everywhere, window_one_longer, window_one_shorter, unscaled_rotary, scaling_everywhere],
    "granite": [full_residuals, unscaled_embeddings, unscaled_attention, unscaled_logits],
    "phi3": [whole_heads_rotated, unscaled_rotary, short_factors, unsharpened_rotary]
    + [window_one_longer, window_one_shorter, keys_and_values_swapped, gates_swapped],
    "gpt_neox": [
        one_after_the_other,
        whole_heads_rotated,
        neighbours_rotated,
        biases_dropped,
        norms_of_the_mean_square,
        keys_and_values_swapped,
        unscaled_attention,
    ],
    "gpt2": [
        attention_not_scaled_by_depth,
        positions_one_later,
        biases_dropped,
        norms_of_the_mean_square,
        keys_and_values_swapped,
        unscaled_attention,
    ],
    "starcoder2": [window_one_longer, window_one_shorter, biases_dropped, norms_of_the_mean_square],
    "cohere2": [
        one_after_the_other,
        halves_rotated,
        unscaled_logits,
        windows_everywhere,
        window_one_shorter,
        rotary_everywhere,
        norms_of_the_mean_square,
    ],
    "mixtral": [*EXPERTS, weights_not_divided, window_one_longer, window_one_shorter],
    "qwen2_moe": [*EXPERTS, weights_divided, shared_perceptron_ungated, windows_everywhere, biases_dropped],
    "qwen3_moe": [*EXPERTS, weights_not_divided, head_norms_swapped],
    "granitemoe": [*EXPERTS, weights_not_divided, full_residuals, unscaled_embeddings, unscaled_logits],
    "gpt_oss": [*EXPERTS, weights_not_divided, windows_everywhere, window_one_longer, window_one_shorter]
    + [unscaled_rotary, bounds_truncated, sinks_dropped, biases_dropped, expert_biases_dropped, gates_before_ups]
    + [unclamped_experts, clamped_a_tenth_later, another_alpha],
    "glm4": [halves_rotated, whole_heads_rotated, outer_norms_swapped, biases_dropped, gates_swapped],
    "mamba2": [*SCANS, scans_normalised_together, unbounded_steps, biases_dropped],
    "bamba": [*SCANS, whole_heads_rotated, biases_dropped, gates_swapped],
    "granitemoehybrid": [*SCANS, scans_normalised_together, rotary_where_there_is_none, gates_swapped, full_residuals]
    + [unscaled_embeddings, unscaled_logits, unscaled_attention],
    "granitemoehybrid_experts": [*EXPERTS, weights_not_divided, shared_gates_swapped, gate_and_values_swapped]
    + [written_and_read_swapped, full_residuals, unscaled_attention],
    "qwen3_next": [*DELTAS, *EXPERTS, delta_projections_not_grouped_by_key, weights_not_divided]
    + [shared_perceptron_ungated],
    "qwen3_5_text": [*DELTAS, delta_projections_grouped_by_key, biases_dropped, gates_swapped],
    "qwen3_5_moe_text": [*DELTAS, *EXPERTS, delta_projections_grouped_by_key, weights_not_divided]
    + [shared_perceptron_ungated],
}
MUTATIONS |= {
    "deepseek_v2": [*LATENTS, query_scales_dropped, unsharpened_scale, unsharpened_rotary, unscaled_rotary, any_group]
    + [unscaled_experts, weights_divided, biases_dropped],
    "deepseek_v2_lite": [*LATENTS, weights_divided, biases_dropped],
    "deepseek_v3": [*LATENTS, query_scales_dropped, unsharpened_scale, unscaled_rotary, any_group]
    + [groups_by_their_best, unscaled_experts, weights_not_divided, balance_ignored],
}
WITHOUT = {
    "gpt_neox": [scaled_by_the_width],  # which is the width of a head
    "gpt2": [scaled_by_the_width, theta_times_ten],
    "cohere2": [norms_swapped],  # it has one
    "mamba2": [scaled_by_the_width, theta_times_ten, norms_swapped],
    "granitemoehybrid": [theta_times_ten],
}


def wrong_fields(name):
    """The mutations of a fixture."""
    tied = [tied_to_the_table] if name in UNTIED else []
    known = [*EVERYWHERE, *MUTATIONS.get(name, ()), *tied]
    return [mutate for mutate in known if mutate not in WITHOUT.get(name, ())]
