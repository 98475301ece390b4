"""Architectures without a pipeline plan, made small: each is equal to itself whole, or refused in one sentence."""

from inspect import signature
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.split.call import Call
from ds_lgamp.integrations.transformers.models import ModelLayers
from tests.integrations.transformers.by_hand import Computed, assert_same, computed, layers_of, whole
from tests.integrations.transformers.models import micro_batch
from tests.integrations.transformers.shrink import small
from tests.slow import slow_except

TRANSLATION = {
    **dict.fromkeys(["encoder_layerdrop", "decoder_layerdrop"], 0.0),
    **dict.fromkeys(["encoder_layers", "decoder_layers"], 2),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 48),
}
LABELS = {"dummy_inputs": {"input_ids": [[4, 5, 6]], "labels": [[4, 5, 6]]}}
PICTURE = {"dummy_inputs": {"pixel_values": {"shape": [1, 3, 32, 32]}}}
VISION = {"image_size": 32, "patch_size": 8}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4, "mamba_chunk_size": 4}
FUNNEL = {"block_sizes": [2, 2], "d_head": 8, "n_head": 4, "d_inner": 48}
STAGES = {"hidden_sizes": [8, 16], "depths": [2, 2]}
OTHER_SHAPE = "its blocks return something else than tensors of the shape that they get"
ANOTHER_TENSOR = "its blocks get another tensor that depends on parameters, besides hidden states"
READ = "its forward reads a parameter of '.*' before the blocks without calling it"


class Case(NamedTuple):
    model: str
    """The name of a class of models, from which that of the configuration follows unless it is given."""
    settings: dict[str, Any] = {}
    refused: str | None = None
    """What is said; None if it trains."""
    block: dict[str, Any] = {}
    config: str | None = None
    apart: str | None = None
    """What is said where layers are on several ranks; None if it is the same."""


VALUES = "what module '.*' before the blocks returns cannot be known on pipeline ranks that lack it"
CASES = {
    "BigBird": Case("BigBirdForMaskedLM", {"attention_type": "original_full"}),
    "I-BERT": Case("IBertForMaskedLM"),
    "I-BERT in integers": Case("IBertForMaskedLM", {"quant_mode": True}, apart=VALUES),
    "RecurrentGemma": Case("RecurrentGemmaForCausalLM", {"lru_width": 32, "attention_window_size": 8}),
    "Funnel": Case("FunnelForMaskedLM", FUNNEL, "after the blocks its forward computes with what an earlier one"),
    "Funnel without a decoder": Case("FunnelForSequenceClassification", FUNNEL),
    "CLIP's texts": Case("CLIPTextModel", config="CLIPTextConfig"),
    "CLIP's pictures": Case("CLIPVisionModel", VISION, block=PICTURE, config="CLIPVisionConfig"),
    "Swin": Case(
        "SwinForImageClassification",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4},
        OTHER_SHAPE,
        PICTURE,
    ),
    "ViT-MAE": Case("ViTMAEForPreTraining", VISION, "what the model returns depends on random numbers", PICTURE),
    "BEiT": Case("BeitForImageClassification", VISION, block=PICTURE),
    "DINOv2": Case("Dinov2ForImageClassification", VISION, block=PICTURE),
    "ConvNeXt": Case("ConvNextForImageClassification", {**STAGES, "num_stages": 2}, OTHER_SHAPE, PICTURE),
    "ResNet": Case(
        "ResNetForImageClassification", {**STAGES, "hidden_sizes": [8, 8], "embedding_size": 8}, OTHER_SHAPE, PICTURE
    ),
    "Longformer": Case("LongformerForMaskedLM", {"attention_window": 4}),
    "Mamba": Case("MambaForCausalLM", {"state_size": 4}),
    "RWKV": Case("RwkvForCausalLM"),
    "Bamba": Case("BambaForCausalLM", {**MAMBA, "attn_layer_indices": [1]}),
    "Granite with Mamba": Case(
        "GraniteMoeHybridForCausalLM", {**MAMBA, "layer_types": ["mamba", "attention", "mamba", "attention"]}
    ),
    "xLSTM": Case("xLSTMForCausalLM", {"num_heads": 2, "qk_dim_factor": 0.5, "v_dim_factor": 1.0, "chunk_size": 4}),
    "UMT5": Case("UMT5ForConditionalGeneration", {"d_kv": 8, "d_ff": 48}),
    "BART": Case("BartForConditionalGeneration", TRANSLATION),
    "Pegasus": Case("PegasusForConditionalGeneration", TRANSLATION, block=LABELS),
    "Pegasus without labels": Case("PegasusForConditionalGeneration", TRANSLATION),
    "M2M-100": Case("M2M100ForConditionalGeneration", {**TRANSLATION, "decoder_start_token_id": 1}, block=LABELS),
    "FSMT": Case(
        "FSMTForConditionalGeneration",
        {**TRANSLATION, "langs": ["a", "b"], "src_vocab_size": 64, "tgt_vocab_size": 64},
        "changes in place a tensor that it gets",
        LABELS,
    ),
    "XLNet": Case("XLNetLMHeadModel", {"d_inner": 48}),
    "XLM": Case("XLMWithLMHeadModel", {"emb_dim": 32}, "its module '.*' runs between blocks"),
    "DeBERTa": Case("DebertaV2ForMaskedLM", {"relative_attention": True, "pos_att_type": ["c2p"]}, ANOTHER_TENSOR),
    "DeBERTa without positions": Case("DebertaV2ForMaskedLM"),
    "SqueezeBERT": Case("SqueezeBertForMaskedLM", {"embedding_size": 32}, OTHER_SHAPE),
    "GPT": Case("OpenAIGPTLMHeadModel", {}, OTHER_SHAPE),
    "ModernBERT": Case("ModernBertForMaskedLM", {"local_attention": 4}),
    "RoFormer": Case("RoFormerForMaskedLM", {"embedding_size": 32}),
    "GPT-Neo": Case(
        "GPTNeoForCausalLM", {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "window_size": 4}
    ),
}


DEFAULT = [
    *(("I-BERT", ranks) for ranks in (1, 2)),
    *(("I-BERT in integers", ranks) for ranks in (1, 2)),
    ("RecurrentGemma", 2),
    *((name, 1) for name in ("Funnel", "Swin", "ViT-MAE", "FSMT")),
]
"""What is refused whatever the number of ranks is refused before anything depends on it."""


def made(case: Case) -> Any:
    torch.manual_seed(0)
    model_class = getattr(transformers, case.model)
    config_class = getattr(transformers, case.config) if case.config else model_class.config_class
    return model_class(small(config_class, **case.settings)).train()


def batch_of(model: Any, number: int) -> dict[str, Tensor]:
    """Returns what the model takes: token ids or pictures, and labels if it takes them."""
    batch, names = micro_batch(0, 0, number), signature(model.forward).parameters
    if model.main_input_name == "pixel_values":
        pictures = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(number))
        batch = {"pixel_values": pictures, "labels": torch.tensor([0, 1])}
    elif "Classification" in type(model).__name__:
        batch["labels"] = torch.tensor([0, 1])
    return {name: value.clone() for name, value in batch.items() if name in names}


def in_layers(model: Any, layers: ModelLayers, arguments: dict[str, Tensor], apart: bool) -> Computed:
    """Calls the layers one after another, each as if it were the only one on its rank if they are ``apart``."""
    torch.manual_seed(1)
    first, *others = layers.modules

    def begin() -> Call:
        call = Call(*layers.arguments((), dict(arguments)))
        layers.calls.all, layers.calls._now.in_chunk = [call], None
        return call

    call = begin()
    hidden = first(call)
    for layer in others:
        if apart:
            begin()
        hidden = layer(hidden)
    return computed(model, hidden)


@pytest.mark.parametrize(("name", "ranks"), slow_except(DEFAULT, [*product(CASES, (1, 2))], several=True))
def test_an_architecture_is_equal_or_refused(name: str, ranks: int) -> None:
    case = CASES[name]
    refused = case.apart or case.refused if ranks > 1 else case.refused
    model = made(case)
    if refused is not None:
        with pytest.raises(ConfigError, match=refused):
            layers_of(model, pipeline_ranks=ranks, **case.block)
        return
    # Buffers change with every call.
    layers, other = layers_of(model, pipeline_ranks=ranks, **case.block), made(case)
    for number in range(2):
        batch = batch_of(model, number)
        assert_same(whole(other, batch), in_layers(model, layers, batch, ranks > 1))
