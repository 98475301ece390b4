"""The layers equal Megatron-core's GPTModel: the same weights, loss and gradients."""

from typing import NamedTuple

import pytest
import torch
from deepspeed.pipe import PipelineModule

from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.models import seed
from tests.integrations.megatron.on_cpu import start_megatron

VOCABULARY, SEQUENCE, END = 64, 24, 0


class Case(NamedTuple):
    options: dict = {}
    """Options of the TransformerConfig."""
    positions: str = "learned_absolute"
    tied: bool = True
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    reset_attention_mask: bool = False
    reset_position_ids: bool = False


def llama():
    return {
        "num_query_groups": 2,
        "kv_channels": 16,
        "ffn_hidden_size": 48,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-3,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "qk_layernorm": True,
        "rotary_interleaved": True,
    }


def experts():
    return {
        "num_layers": 4,
        "num_moe_experts": 4,
        "moe_layer_freq": 2,
        "moe_shared_expert_intermediate_size": 24,
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
        "moe_aux_loss_coeff": [0.1, 0.1],
        "moe_z_loss_coeff": 0.1,
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
        "init_method_std": 0.2,
    }


CASES = {
    "tied, learned positions": Case(),
    "untied, rotary": Case(positions="rope", tied=False),
    "grouped queries, RMSNorm, SwiGLU, no biases, norms of queries": Case(
        llama(), "rope", False, rotary_base=500, rotary_percent=0.5
    ),
    "experts in every second layer, auxiliary losses": Case(experts(), "rope", False),
    "documents apart, learned positions restart": Case(reset_attention_mask=True, reset_position_ids=True),
    "documents apart, rotary": Case({"num_query_groups": 2}, "rope", False, reset_attention_mask=True),
    "learned positions restart": Case(reset_position_ids=True),
    "rotary positions do not restart": Case(positions="rope", reset_position_ids=True),
}


def samples():
    """Returns tokens [2, s] with a few documents each, and their labels."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(1, VOCABULARY, (2, SEQUENCE + 1), generator=generator)
    tokens[0, [0, 6, 7, 15]] = END
    tokens[1, [11, SEQUENCE - 1]] = END
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def by_dataset(case, tokens):
    """Returns Megatron-core's attention masks [b, 1, s, s], loss masks [b, s] and positions [b, s]."""
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

    options = case.reset_position_ids, case.reset_attention_mask, True, True
    return map(torch.stack, zip(*(_get_ltor_masks_and_position_ids(row, END, *options) for row in tokens)))


def config_of(case):
    from megatron.core.transformer import TransformerConfig

    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "use_cpu_initialization": True}
    return TransformerConfig(**{**sizes, "hidden_dropout": 0.0, "attention_dropout": 0.0, **case.options})


def gpt_model(case):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

    config = config_of(case)
    if config.num_moe_experts is None:
        spec = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    else:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    return GPTModel(
        config,
        spec,
        VOCABULARY,
        SEQUENCE,
        position_embedding_type=case.positions,
        share_embeddings_and_output_weights=case.tied,
        rotary_base=case.rotary_base,
        rotary_percent=case.rotary_percent,
    )


def pipeline(case):
    from ds_lgamp.integrations.megatron.layers.gpt_layers import gpt_layer_specs, language_model_loss

    specs = gpt_layer_specs(
        config_of(case),
        VOCABULARY,
        SEQUENCE,
        case.positions,
        case.tied,
        rotary_base=case.rotary_base,
        rotary_percent=case.rotary_percent,
        end_of_document=END,
        reset_attention_mask=case.reset_attention_mask,
        reset_position_ids=case.reset_position_ids,
    )
    with quiet():
        return PipelineModule(specs, num_stages=1, loss_fn=language_model_loss)


def seeing_the_last(mask):
    """Returns for how many tokens a transformer layer gives another hidden state if the last token has another."""
    from megatron.core.transformer.enums import AttnMaskType

    from ds_lgamp.integrations.megatron.layers.transformer_block import TransformerBlock

    block = TransformerBlock(config_of(Case()), 1, None, AttnMaskType[mask])
    hidden = torch.randn(SEQUENCE, 1, 32)
    other = torch.cat((hidden[:-1], -hidden[-1:]))
    return (block(hidden) != block(other)).any(dim=-1).sum().item()


def compare(cases):
    """Returns by case the loss and gradients of both models, and the GPTModel's weights before and after a round
    trip."""
    from ds_lgamp.integrations.megatron.layers.gpt_weights import from_gpt_model, to_gpt_model

    prepare_rank()
    start_megatron()
    tokens, labels = samples()
    results = {"tokens that see the last one": {mask: seeing_the_last(mask) for mask in ("causal", "no_mask")}}
    for name, case in cases.items():
        seed(7)
        model, module = gpt_model(case), pipeline(case)
        first = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        module.load_state_dict(from_gpt_model(model.state_dict()))
        model.load_state_dict(to_gpt_model(module.state_dict()))
        mask, loss_mask, positions = by_dataset(case, tokens)
        losses = model(tokens, positions, mask, labels=labels)
        expected = (losses * loss_mask).sum() / loss_mask.sum()
        loss = module.loss_fn(module(tokens), (labels, loss_mask))
        expected.backward()
        loss.backward()
        gradients = to_gpt_model({name: parameter.grad for name, parameter in module.named_parameters()})
        results[name] = {
            "losses": (loss.item(), expected.item()),
            "gradients": (gradients, {name: parameter.grad for name, parameter in model.named_parameters()}),
            "weights": (first, dict(model.named_parameters())),
        }
    return results


@pytest.fixture(scope="module")
def compared():
    (results,) = run_on_ranks(1, compare, CASES)
    return results


@pytest.mark.parametrize("name", CASES)
def test_weights_of_a_gpt_model_give_its_loss_and_gradients(compared, name):
    loss, expected = compared[name]["losses"]
    assert loss == pytest.approx(expected, rel=1e-6)
    gradients, expected = compared[name]["gradients"]
    assert gradients.keys() == expected.keys()
    for key, gradient in gradients.items():
        assert torch.allclose(gradient, expected[key], rtol=1e-4, atol=1e-7), key


@pytest.mark.parametrize("name", CASES)
def test_weights_come_back_to_the_bit(compared, name):
    weights, expected = compared[name]["weights"]
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in weights)


def test_a_layer_is_causal_only_if_asked(compared):
    assert compared["tokens that see the last one"] == {"causal": 1, "no_mask": SEQUENCE}
