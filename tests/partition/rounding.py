"""Rounding by hand, parameter by parameter."""

import torch

BLOCK, LARGEST = 32, {8: 127, 4: 7}


def rounded(tensor, bits):
    """Rounds a parameter, or its gradient, block by block."""
    if bits is None:
        return tensor
    blocks = []
    for block in tensor.reshape(-1).float().split(BLOCK):
        scale = (block.abs().max() / LARGEST[bits]).bfloat16().float()
        blocks.append(torch.round(block * (1 / scale)) * scale if scale > 0 else torch.zeros_like(block))
    return torch.cat(blocks).to(tensor.dtype).view(tensor.shape)
