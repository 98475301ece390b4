"""ds_lgamp through ``deepspeed.initialize``, as in a training script."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule

import ds_lgamp
from benchmarks.contenders import Layout
from benchmarks.contenders.stock_pipeline import train_batch
from benchmarks.model import ADAM_EPSILON, LEARNING_RATE, Block, loss_function
from testing.deepspeed_rank import is_ours, quiet


class Layered:
    """ds_lgamp with one block per chunk and modular placement.

    Args:
        layout: ranks and model.
        zero_stage: ZeRO stage.
        resident_chunks: chunks with full parameters at one time.
        recompute: value of the configuration key. "blocks" makes the model recompute its blocks, which are smaller than
            a chunk at "1f1b".
        micro_batch_group: value of the configuration key.
        schedule: value of the configuration key. "1f1b" has one chunk per rank.
        defer_gathers: value of the configuration key. A benchmark that times single steps would miss gathers behind
            them.
        zero: further keys of DeepSpeed's ``zero_optimization``.
        more: further keys of ds_config.json, or other values of some.
        optimizer: makes one of parameters; None for the one of ds_config.json.
        block: further keys of the block.
    """

    def __init__(
        self,
        layout: Layout,
        zero_stage: int,
        resident_chunks: int,
        recompute: str = "full",
        micro_batch_group: int | str = "all",
        schedule: str = "layered",
        defer_gathers: bool = False,
        zero: Mapping[str, Any] = MappingProxyType({}),
        more: Mapping[str, Any] = MappingProxyType({}),
        optimizer: Callable[[Any], Any] | None = None,
        **block: Any,
    ) -> None:
        self.layout = layout
        ds_lgamp.install()
        config = {
            "train_micro_batch_size_per_gpu": layout.size.samples,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": zero_stage, **zero},
            "optimizer": {
                "type": "AdamW",
                # This configuration selects torch's fused AdamW.
                "params": {"lr": LEARNING_RATE, "eps": ADAM_EPSILON, "weight_decay": 0.01},
            },
            "ds_lgamp": {
                "schedule": schedule,
                **({} if schedule == "1f1b" else {"layers_per_chunk": 1}),
                "resident_chunks": resident_chunks,
                "recompute": "none" if recompute == "blocks" else recompute,
                "micro_batch_group": micro_batch_group,
                "defer_gathers": defer_gathers,
                **block,
            },
            **more,
        }
        with quiet():
            module = PipelineModule(
                [LayerSpec(Block, index, layout.size, recompute == "blocks") for index in range(layout.size.blocks)],
                num_stages=layout.pipeline_ranks,
                loss_fn=loss_function,
                partition_method="uniform",
            )
            self.engine, *_ = deepspeed.initialize(
                model=module, model_parameters=module.parameters(), optimizer=optimizer, config=config
            )
        assert is_ours(self.engine)

    def step(self, step: int, micro_batches: int) -> float:
        return train_batch(self.engine, self.layout, step, micro_batches)

    def held(self) -> int:
        return sum(unit.storage.resident for unit in self.engine.optimizer.partition.units)
