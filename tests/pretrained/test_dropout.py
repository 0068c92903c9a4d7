"""Rates of dropout in the configs of checkpoints: read, written back, and left out where a load asks for it."""

import pytest

from dew.nn.backbones.causal_transformer import DROPOUT_RATES
from dew.pretrained import CheckpointError, describe

RATES = {
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.2, "attn_pdrop": 0.3},
    "starcoder2": {"residual_dropout": 0.1, "embedding_dropout": 0.2, "attention_dropout": 0.3},
    "gpt_neox": {"hidden_dropout": 0.1, "attention_dropout": 0.3},
    "phi3": {"resid_pdrop": 0.1, "attention_dropout": 0.3},
    "llama": {"attention_dropout": 0.3},
    "deepseek_v3": {"attention_dropout": 0.3},
    "bamba": {"attention_dropout": 0.3},
}
READ = {"gpt_neox": (0.1, 0.1, 0.3), "phi3": (0.1, 0, 0.3), "gpt2": (0.1, 0.2, 0.3), "starcoder2": (0.1, 0.2, 0.3)}


def rates_of(module):
    return tuple(getattr(module, name) for name in DROPOUT_RATES)


@pytest.mark.parametrize("name", RATES)
def test_rates_of_dropout_are_read_and_written_and_may_be_left_out(copied, name):
    source = copied(name, **RATES[name])
    described = describe(source)
    assert rates_of(described.module) == READ.get(name, (0, 0, 0.3))
    written = described.family.config_dict(described.module)
    assert {field: written[field] for field in RATES[name]} == RATES[name]
    assert rates_of(describe(source, dropout=False).module) == (0, 0, 0)


def test_absent_rates_are_those_of_the_config_classes(copied):
    for name, rates in RATES.items():
        module = describe(copied(name, **dict.fromkeys(rates, "absent"))).module
        assert rates_of(module) == ((0.1, 0.1, 0.1) if name == "gpt2" else (0, 0, 0))


@pytest.mark.parametrize("rate", [1, -0.1, "0.1", True])
def test_a_rate_of_dropout_that_is_none_is_refused(copied, rate):
    with pytest.raises(CheckpointError, match="resid_pdrop must be from 0 up to 1"):
        describe(copied("gpt2", resid_pdrop=rate))
