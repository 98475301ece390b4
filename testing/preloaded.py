"""What the ranks of tests and benchmarks find imported and found out already, because that takes seconds.

megatron is not included, because some ranks prepare for it first. But most of its time goes into what is.
"""

import gc
from contextlib import suppress

import deepspeed.module_inject.auto_ep_layer  # noqa: F401
import deepspeed.ops
import torch
import torch._inductor.compile_fx  # noqa: F401
import torch.distributed._tensor  # noqa: F401
import transformers.modeling_utils  # noqa: F401

import ds_lgamp.integrations.deepspeed.hook.initialize  # noqa: F401

with suppress(ImportError):
    import peft  # noqa: F401
    import wandb  # noqa: F401
    from torch.utils import tensorboard  # noqa: F401

COMPATIBLE = deepspeed.ops.__compatible_ops__
"""Which extensions of DeepSpeed this machine could compile. Each rank would run compilers to find out."""

if not torch.accelerator.is_available():
    # These keep the stack of every torch.manual_seed for the time when such a device begins, which takes a millisecond.
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = torch.mtia.manual_seed_all = lambda seed: None

# A fork that looks for garbage would otherwise look at all that was imported, and copy its memory to mark it.
gc.freeze()
