"""Wrong rotary fields that parity tests must show, in the form of `tests.pretrained.mutations`."""

import dataclasses

from dew.nn.rope import LongRopeScaling, RotarySpec
from tests.pretrained.mutations import stored_for, with_attention


def with_rotary(module, change):
    return with_attention(
        module, lambda spec: {"rotary": spec.rotary and dataclasses.replace(spec.rotary, **change(spec))}
    )


def theta_times_ten(module, variables):
    return with_rotary(module, lambda spec: {"theta": 10 * spec.rotary.theta}), variables


def unscaled_rotary(module, variables):
    return with_rotary(module, lambda spec: {"scaling": None}), variables


def rotary_everywhere(module, variables):
    rotary = module.layers[0].attention.rotary
    return stored_for(with_attention(module, lambda spec: {"rotary": rotary}), module, variables)


def scaling_everywhere(module, variables):
    rotary = module.layers[-1].attention.rotary
    return stored_for(with_attention(module, lambda spec: {"rotary": rotary}), module, variables)


def neighbours_rotated(module, variables):
    return with_rotary(module, lambda spec: {"interleaved": True}), variables


def whole_heads_rotated(module, variables):
    def change(spec):
        scaling = spec.rotary.scaling
        if isinstance(scaling, LongRopeScaling):  # one factor for each frequency, of which there are now more
            times = round(1 / spec.rotary.fraction)
            short, long = times * scaling.short_factor, times * scaling.long_factor
            scaling = dataclasses.replace(scaling, short_factor=short, long_factor=long)
        return {"fraction": 1.0, "scaling": scaling}

    return with_rotary(module, change), variables


def short_factors(module, variables):
    def change(spec):
        scaling = spec.rotary.scaling
        return {"scaling": dataclasses.replace(scaling, long_factor=scaling.short_factor)}

    return with_rotary(module, change), variables


def unsharpened_rotary(module, variables):
    return with_rotary(
        module, lambda spec: {"scaling": dataclasses.replace(spec.rotary.scaling, attention_factor=1.0)}
    ), variables


def one_base_for_all(module, variables):
    theta = module.layers[-1].attention.rotary.theta
    return with_rotary(module, lambda spec: {"theta": theta}), variables


def halves_rotated(module, variables):
    return with_rotary(module, lambda spec: {"interleaved": False}), variables


def rotary_where_there_is_none(module, variables):
    return with_attention(module, lambda spec: {"rotary": RotarySpec(theta=1e4)}), variables


def bounds_truncated(module, variables):
    return with_rotary(
        module, lambda spec: {"scaling": dataclasses.replace(spec.rotary.scaling, truncate=True)}
    ), variables
