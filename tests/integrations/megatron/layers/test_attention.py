"""Attention inside documents: most of torch's fused kernels take a mask or shared keys, not both, and the blocks of a
chunk share one mask."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import nn

from ds_lgamp.integrations.megatron.layers import transformer_block
from ds_lgamp.integrations.megatron.layers.transformer_block import ScaledDotProductAttention, document_mask

SEQUENCE, HEADS, CHANNELS = 6, 4, 2


@pytest.fixture
def calls(monkeypatch):
    """Collects the named arguments of torch's attention, and the heads of its keys."""
    kernel, seen = nn.functional.scaled_dot_product_attention, []

    def noted(query, key, value, **named):
        seen.append(SimpleNamespace(**named, heads=key.shape[1]))
        return kernel(query, key, value, **named)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", noted)
    return seen


def attend(groups, mask, dtype=torch.float32):
    config = SimpleNamespace(attention_dropout=0.0, tensor_model_parallel_size=1)
    kind = AttnMaskType.causal if mask is None else AttnMaskType.arbitrary
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(SEQUENCE, 1, heads, CHANNELS, generator=generator).to(dtype) for heads in (HEADS, groups, groups)
    )
    return ScaledDotProductAttention(config, kind, None)(query, key, value, mask)


def documents():
    return torch.tensor([[0, 0, 1, 1, 1, 2]])


@pytest.mark.parametrize("groups", [HEADS, 2, 1])
def test_no_kernel_gets_a_mask_and_shared_keys(calls, groups):
    attend(groups, document_mask(documents()))
    attend(groups, None)
    masked, causal = calls
    assert (masked.enable_gqa, masked.heads) == (False, HEADS)
    assert (causal.enable_gqa, causal.heads) == (groups != HEADS, groups)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_result_is_that_of_the_mask(dtype):
    mask = document_mask(documents())
    expected = attend(HEADS, mask, dtype)
    assert not expected.isnan().any()
    query, key, value = (
        torch.randn(SEQUENCE, 1, HEADS, CHANNELS, generator=generator).to(dtype).permute(1, 2, 0, 3)
        for generator in [torch.Generator().manual_seed(1)]
        for _ in range(3)
    )
    plain = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=~mask)
    assert torch.equal(expected, plain.permute(2, 0, 1, 3).flatten(start_dim=2))


def test_blocks_that_get_the_same_documents_share_a_mask(calls):
    one, other = documents(), documents()
    assert document_mask(one) is document_mask(one)
    assert document_mask(one) is not document_mask(other)
    mask = document_mask(one)
    for dtype in (torch.float32, torch.float32, torch.bfloat16):
        attend(HEADS, mask, dtype)
    first, second, third = (call.attn_mask for call in calls)
    assert first is second and third.dtype == torch.bfloat16


def test_a_mask_goes_with_its_documents():
    mine = documents()
    mask = weakref.ref(document_mask(mine))
    bias = weakref.ref(transformer_block._bias(mask(), torch.float32))
    del mine
    gc.collect()
    assert mask() is None and bias() is None


def test_the_seed_of_a_rank_never_comes_from_a_default_device(monkeypatch):
    """Reading it there would wait for the device."""
    monkeypatch.setattr(transformer_block, "get_tensor_model_parallel_rank", lambda: 1)
    with torch.device("meta"), transformer_block.random_numbers(True, torch.device("cpu")):
        pass
