"""Megatron-core's Mamba, attention and MLP layers of PyTorch parts, for Megatron-LM's pretrain_mamba.py on the CPU::

    pretrain_mamba.py --spec testing.mamba_layers stack --hybrid-override-pattern M-M*M-M- FLAGS

Megatron-core has a specification with Transformer Engine's parts only. Its Mamba layer takes its kernel from the
package mamba_ssm, which needs a GPU.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


def convolve_and_scan(
    zxbcdt: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    headdim: int,
    ngroups: int,
    **_options: Any,
) -> torch.Tensor:
    """Takes the place of ``mamba_split_conv1d_scan_combined`` of mamba_ssm: the recurrence of Mamba 2 (Dao and Gu,
    arXiv:2405.21060), one token after another.

    Args:
        zxbcdt: the gate, the input, B, C and the time steps [batch, length, channels].
        weight: of the causal convolution [channels of the input, B and C, width].

    Returns [batch, length, heads * headdim].
    """
    batch, length, channels = zxbcdt.shape
    heads, width = len(A), weight.shape[1]
    inner = heads * headdim
    states = (channels - 2 * inner - heads) // 2
    gate, mixed, steps = zxbcdt.split([inner, inner + 2 * states, heads], dim=-1)
    padded = F.pad(mixed.transpose(1, 2), (width - 1, 0))
    mixed = F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight))).transpose(1, 2)
    inputs, B, C = mixed.split([inner, states, states], dim=-1)
    inputs = inputs.view(batch, length, heads, headdim)
    B, C = (
        part.view(batch, length, ngroups, states // ngroups).repeat_interleave(heads // ngroups, dim=2)
        for part in (B, C)
    )
    steps = F.softplus(steps + dt_bias)
    state = inputs.new_zeros(batch, heads, headdim, states // ngroups)
    outputs = []
    for token in range(length):
        decay = torch.exp(steps[:, token] * A)[..., None, None]
        update = (steps[:, token, :, None] * inputs[:, token])[..., None] * B[:, token, :, None]
        state = state * decay + update
        outputs.append((state * C[:, token, :, None]).sum(-1) + D[:, None] * inputs[:, token])
    return torch.stack(outputs, dim=1).flatten(2) * F.silu(gate)


mamba_mixer.HAVE_MAMBA_SSM = True
mamba_mixer.mamba_split_conv1d_scan_combined = convolve_and_scan

_parts = get_gpt_layer_local_spec().submodules
# The gated norm is one more part of mamba_ssm, and the stack's last norm is one of Transformer Engine.
_mixer = ModuleSpec(
    module=mamba_mixer.MambaMixer,
    params={"rmsnorm": False},
    submodules=mamba_mixer.MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
)
stack = ModuleSpec(
    module=MambaStack,
    params={"post_layer_norm": False},
    submodules=MambaStackSubmodules(
        mamba_layer=ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=_mixer, mamba_bda=get_bias_dropout_add),
        ),
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=_parts.input_layernorm,
                self_attention=_parts.self_attention,
                self_attn_bda=get_bias_dropout_add,
            ),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=_parts.pre_mlp_layernorm, mlp=_parts.mlp, mlp_bda=get_bias_dropout_add
            ),
        ),
    ),
)
