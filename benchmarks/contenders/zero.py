"""Stock DeepSpeed's ZeRO stages with gradient accumulation."""

from collections.abc import Sequence
from contextlib import nullcontext

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from benchmarks.contenders import Layout
from benchmarks.model import block_elements, build_blocks, build_optimizer, loss_function, micro_batch


class Zero:
    """DeepSpeed's plain engine.

    Args:
        layout: ranks and model.
        stage: ZeRO stage, 0 to 3.
        resident_chunks: at stage 3, the largest number of blocks to hold; None for DeepSpeed's defaults.
        deferred_reduce: whether to reduce gradients only after the last micro-batch; full gradients are held until
            then.
        recompute: see :class:`~benchmarks.model.Block`.
        hpz: at stage 3, DeepSpeed's zero_hpz_partition_size.
        offload: keys of DeepSpeed's ``zero_optimization`` that say what lies in the memory of the host.
    """

    def __init__(
        self,
        layout: Layout,
        stage: int,
        resident_chunks: int | None = None,
        deferred_reduce: bool = False,
        recompute: bool = True,
        hpz: int = 1,
        offload: Sequence[str] = (),
    ) -> None:
        self.layout, self.deferred_reduce = layout, deferred_reduce
        self.blocks = build_blocks(layout.size, range(layout.size.blocks), recompute)
        zero: dict = {
            "stage": stage,
            **by_blocks(block_elements(layout.size)),
            # By default tensors of up to 1e5 elements stay on all ranks. That is every tensor of a small model.
            "stage3_param_persistence_threshold": 0,
            "zero_hpz_partition_size": hpz,
            **{key: {"device": "cpu", "pin_memory": False} for key in offload},
        }
        if resident_chunks is not None:
            zero |= hold_at_most(resident_chunks, block_elements(layout.size))
        model = nn.Sequential(*self.blocks)
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=build_optimizer(model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": layout.size.samples,
                "gradient_accumulation_steps": 1,
                "gradient_clipping": 0.0,
                "zero_optimization": zero,
                # DeepSpeed would compile its own optimizer for the host.
                "zero_force_ds_cpu_optimizer": False,
            },
        )

    def step(self, step: int, micro_batches: int) -> float:
        layout, engine = self.layout, self.engine
        engine.set_train_batch_size(layout.size.samples * micro_batches * layout.data_ranks)
        total = torch.zeros(())
        first = micro_batches * dist.get_rank()
        with engine.coalesce_grad_reduction() if self.deferred_reduce else nullcontext():
            for index in range(micro_batches):
                last = index == micro_batches - 1
                # Otherwise the engine counts micro-batches from its first step on, as if all steps had the same number.
                engine.set_gradient_accumulation_boundary(last)
                inputs, target = micro_batch(layout.size, step, first + index)
                # The input needs a gradient, as behind an embedding. DeepSpeed reduces a leaf module's gradients when
                # the gradient of its input exists.
                loss = loss_function(engine(inputs.requires_grad_(inputs.is_floating_point())), target)
                engine.backward(loss)
                total += loss.detach()
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        dist.all_reduce(total)
        return total.item() / (micro_batches * layout.data_ranks)

    def held(self) -> int:
        return sum(any(map(is_gathered, block.parameters())) for block in self.blocks)


def by_blocks(elements: int) -> dict:
    """DeepSpeed's configuration for communication block by block of ``elements`` parameters, as in all other
    contenders."""
    return {
        # The default of 5e8 elements suits models that are larger than such a bucket. Here it would be a buffer of 2
        # GB.
        "reduce_bucket_size": elements,
        "allgather_bucket_size": elements,
        # Sends gradients to the rank that owns them. The default all-reduces, which sends twice as much.
        "use_multi_rank_bucket_allreduce": False,
    }


def hold_at_most(chunks: int, elements: int) -> dict:
    """DeepSpeed's configuration that holds at most ``chunks`` blocks of ``elements`` parameters each, by DeepSpeed's
    own count."""
    return {
        # Gathers a block as a whole, not layer by layer.
        "leaf_module": {"classes": ["benchmarks.model.Block"]},
        "stage3_max_live_parameters": chunks * elements,
        "stage3_prefetch_bucket_size": (chunks - 1) * elements,
        # The optimizer's temporary tensors are as large as the group it updates at once.
        "sub_group_size": elements,
        # Keeps parameters that are used again within this many parameters: the last ``chunks`` blocks of the forward
        # pass.
        "stage3_max_reuse_distance": chunks * elements,
    }


def is_gathered(parameter: nn.Parameter) -> bool:
    """Whether the full parameter exists or its gather is in progress. Always true at stage 2."""
    return getattr(parameter, "ds_status", ZeroParamStatus.AVAILABLE) != ZeroParamStatus.NOT_AVAILABLE
