"""Stock DeepSpeed's pipeline engine: 1F1B with one stage per rank."""

import deepspeed
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine

from benchmarks.contenders import Layout
from benchmarks.contenders.zero import by_blocks
from benchmarks.model import Block, block_elements, build_optimizer, loss_function, micro_batch
from testing.deepspeed_rank import quiet


class StockPipeline:
    """Stock pipeline engine at ZeRO-1, the highest stage it supports.

    Args:
        layout: ranks and model.
        recompute: see :class:`~benchmarks.model.Block`.
    """

    def __init__(self, layout: Layout, recompute: bool = True) -> None:
        self.layout = layout
        size = layout.size
        with quiet():
            module = PipelineModule(
                [LayerSpec(Block, index, size, recompute) for index in range(size.blocks)],
                num_stages=layout.pipeline_ranks,
                loss_fn=loss_function,
                partition_method="uniform",
            )
            self.engine, *_ = deepspeed.initialize(
                model=module,
                optimizer=build_optimizer(module.parameters()),
                config={
                    "train_micro_batch_size_per_gpu": size.samples,
                    "gradient_accumulation_steps": 1,
                    "gradient_clipping": 0.0,
                    "zero_optimization": {"stage": 1, **by_blocks(block_elements(size))},
                    "steps_per_print": 1 << 30,
                },
            )

    def step(self, step: int, micro_batches: int) -> float:
        return train_batch(self.engine, self.layout, step, micro_batches)

    def held(self) -> int:
        return self.layout.chunks_per_rank


def train_batch(engine: PipelineEngine, layout: Layout, step: int, micro_batches: int) -> float:
    """Trains one batch with a DeepSpeed pipeline engine. Returns its mean loss."""
    engine.set_train_batch_size(layout.size.samples * micro_batches * layout.data_ranks)
    first = micro_batches * (dist.get_rank() % layout.data_ranks)
    batch = (micro_batch(layout.size, step, first + index) for index in range(micro_batches))
    return engine.train_batch(batch).item()
