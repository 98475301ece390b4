"""PyTorch's selective recomputation: what it keeps of a layer that is recomputed."""

from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

_ATEN = torch.ops.aten
PRODUCTS = [
    *(_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default),
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    *(_ATEN._scaled_dot_product_flash_attention.default, _ATEN._scaled_dot_product_efficient_attention.default),
    _ATEN._scaled_dot_product_cudnn_attention.default,
]
"""Operators whose results are kept: products of matrices and attention, most of a layer's compute."""


def keeping_products() -> tuple[Any, Any]:
    """Returns the contexts of a forward and its recomputation, for torch.utils.checkpoint."""
    return create_selective_checkpoint_contexts(PRODUCTS)
