"""A training script of a model of transformers, with stock DeepSpeed, a block or FSDP2, and the layers of its Llama in
a PipelineModule."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import deepspeed
import peft
import torch
import torch.distributed as dist
import transformers
from deepspeed.pipe import PipelineModule
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ds_lgamp
from benchmarks.contenders import Layout
from benchmarks.contenders.fsdp import is_gathered
from benchmarks.contenders.zero import by_blocks
from benchmarks.model import ModelSize, build_optimizer, losses_alone, micro_batch
from testing.deepspeed_rank import is_ours, quiet

HEAD_WIDTH = 32


def llama(size: ModelSize) -> Any:
    """Makes a Llama with the same values in every process."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=3 * size.width,
        num_hidden_layers=size.blocks,
        num_attention_heads=size.width // HEAD_WIDTH,
        max_position_embeddings=size.sequence,
    )
    return transformers.LlamaForCausalLM(config)


def batch_of(size: ModelSize, step: int, index: int) -> dict[str, torch.Tensor]:
    """Makes the ``index``-th micro-batch of a step, as a collator for language models does."""
    tokens, _ = micro_batch(size, step, index)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


@lru_cache
def reference(size: ModelSize, data_ranks: int, steps: tuple[int, ...]) -> list[float]:
    """Mean loss of each step in one process without parallelism, a :data:`benchmarks.model.Reference`."""
    return alone(llama(size), size, data_ranks, steps)


@lru_cache
def reference_adapted(size: ModelSize, data_ranks: int, steps: tuple[int, ...]) -> list[float]:
    """The same with adapters."""
    return alone(adapted(size), size, data_ranks, steps)


def alone(model: Any, size: ModelSize, data_ranks: int, steps: tuple[int, ...]) -> list[float]:
    """Mean loss of each step of a ``model`` of transformers in one process."""
    return losses_alone(model, lambda tokens, _: model(input_ids=tokens, labels=tokens).loss, size, data_ranks, steps)


class HostModel(NamedTuple):
    """A model of transformers."""

    make: Callable[[ModelSize], Any]
    """Makes it with the same values in every process."""
    batch_of: Callable[[ModelSize, int, int], dict[str, torch.Tensor]]
    """Makes the micro-batch of a step that has a given index."""
    blocks: str
    """The name of its list of blocks."""


LLAMA = HostModel(llama, batch_of, "model.layers")


def adapted(size: ModelSize) -> Any:
    """Makes the Llama with LoRA beside every matrix of its blocks, and the rest frozen."""
    model = llama(size)
    torch.manual_seed(1)
    # As the Trainer does. Without it, stock DeepSpeed's leaf modules free weights that the backward still needs.
    model.enable_input_require_grads()
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


ADAPTED = HostModel(adapted, batch_of, "base_model.model.model.layers")


class Script:
    """The loop that stock DeepSpeed and a block run alike. Only the configuration differs.

    Args:
        layout: one pipeline rank, because every rank feeds its own micro-batches, and the model.
        stage: ZeRO stage.
        accumulation: micro-batches of a rank per step.
        block: the block; None for stock DeepSpeed.
        host: the model.
    """

    def __init__(
        self,
        layout: Layout,
        stage: int,
        accumulation: int,
        block: dict[str, Any] | None = None,
        host: HostModel = LLAMA,
    ) -> None:
        self.layout, self.host = layout, host
        model = host.make(layout.size)
        self.blocks = model.get_submodule(host.blocks)
        config = self.configuration(stage, accumulation, block)
        if block is not None:
            ds_lgamp.install()
        with quiet():
            self.engine, *_ = deepspeed.initialize(
                model=model, optimizer=build_optimizer(_trained(model)), config=config
            )
        assert is_ours(self.engine) == (block is not None)

    def configuration(self, stage: int, accumulation: int, block: dict[str, Any] | None) -> dict[str, Any]:
        """Returns the content of ds_config.json."""
        return configuration(self.layout.size, stage, accumulation, block)

    def step(self, step: int, micro_batches: int) -> float:
        total = torch.zeros(())
        for number in range(micro_batches):
            batch = self.host.batch_of(self.layout.size, step, micro_batches * dist.get_rank() + number)
            loss = self.engine(**batch).loss
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        return total.item() / (micro_batches * self.layout.data_ranks)

    def held(self) -> int:
        return sum(any(parameter.numel() for parameter in block.parameters()) for block in self.blocks)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class Sharded:
    """The same loop with torch's FSDP2, one group per block.

    Args:
        layout: one pipeline rank, and the model.
        host: the model.
        deferred_sync: whether to reduce gradients only after the last micro-batch; full gradients are held until then.
        keeps_last: whether the last block, and what is in no block, stay gathered from the forward to the backward.
    """

    def __init__(self, layout: Layout, host: HostModel, deferred_sync: bool, keeps_last: bool) -> None:
        self.layout, self.host, self.deferred_sync = layout, host, deferred_sync
        self.model = host.make(layout.size)
        self.blocks = self.model.get_submodule(host.blocks)
        mesh = init_device_mesh("cpu", (layout.data_ranks,))
        for part in (*self.blocks, self.model):
            is_last = part in (self.blocks[-1], self.model)
            fully_shard(part, mesh=mesh, reshard_after_forward=not (keeps_last and is_last))
        self.optimizer = build_optimizer(_trained(self.model))

    def step(self, step: int, micro_batches: int) -> float:
        total = torch.zeros(())
        for number in range(micro_batches):
            batch = self.host.batch_of(self.layout.size, step, micro_batches * dist.get_rank() + number)
            self.model.set_requires_gradient_sync(not self.deferred_sync or number == micro_batches - 1)
            loss = self.model(**batch).loss / micro_batches
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / self.layout.data_ranks

    def held(self) -> int:
        return sum(is_gathered(block) for block in self.blocks)


def configuration(size: ModelSize, stage: int, accumulation: int, block: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the content of ds_config.json. DeepSpeed communicates block by block, and at stage 3 fetches one block
    ahead. Its own sizes suit models that are larger than its buffers."""
    elements = sum(parameter.numel() for parameter in llama(size._replace(blocks=1)).model.layers.parameters())
    zero: dict[str, Any] = {"stage": stage, **by_blocks(elements)}
    if stage == 3:
        leaves = {"classes": ["transformers.models.llama.modeling_llama.LlamaDecoderLayer"]}
        zero |= {"leaf_module": leaves, **one_block_ahead(elements)}
    return with_batch(size, accumulation, zero, block)


def one_block_ahead(elements: int) -> dict[str, Any]:
    """Returns the keys by which stage 3 of DeepSpeed fetches one block of so many ``elements`` ahead."""
    return {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 2 * elements,
        "stage3_max_reuse_distance": 2 * elements,
        "stage3_prefetch_bucket_size": elements,
        "sub_group_size": elements,
    }


def with_batch(
    size: ModelSize, accumulation: int, zero: dict[str, Any], block: dict[str, Any] | None
) -> dict[str, Any]:
    """Returns the configuration with the section ``zero_optimization``, and with the block if there is one."""
    return {
        "train_micro_batch_size_per_gpu": size.samples,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        **({} if block is None else {"ds_lgamp": block}),
    }


class ByHand:
    """The same layers as someone writes them into a PipelineModule, trained by ``train_batch`` with the same
    micro-batches. Rotary tables are computed once, and no masks.

    Args:
        layout, stage, accumulation: as in :class:`Script`.
        pipeline_ranks: the stages.
    """

    def __init__(self, layout: Layout, stage: int, accumulation: int, pipeline_ranks: int = 1) -> None:
        self.layout, self.pipeline_ranks = layout, pipeline_ranks
        model = llama(layout.size)
        body = model.model
        tokens, _ = micro_batch(layout.size, 0, 0)
        rotary = body.rotary_emb(torch.zeros(layout.size.width), torch.arange(tokens.shape[1])[None])
        layers = [body.embed_tokens, *(_Layer(layer, rotary) for layer in body.layers), _End(body.norm, model.lm_head)]
        ds_lgamp.install()
        config = configuration(layout.size, stage, accumulation * pipeline_ranks, {})
        with quiet():
            module = PipelineModule(layers, num_stages=pipeline_ranks, loss_fn=_causal_loss, partition_method="uniform")
            self.engine, *_ = deepspeed.initialize(
                model=module, optimizer=build_optimizer(module.parameters()), config=config
            )
        assert is_ours(self.engine)

    def step(self, step: int, micro_batches: int) -> float:
        return self.engine.train_batch(self._batch(step, micro_batches)).item()

    def _batch(self, step: int, micro_batches: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields the micro-batches of all ranks of this pipeline."""
        data_ranks = self.layout.data_ranks // self.pipeline_ranks
        first = dist.get_rank() % data_ranks
        for number in range(micro_batches):
            for rank in range(first, self.layout.data_ranks, data_ranks):
                tokens, _ = micro_batch(self.layout.size, step, micro_batches * rank + number)
                yield tokens, tokens

    def held(self) -> int:
        return sum(unit.storage.resident for unit in self.engine.optimizer.partition.units)


class _Layer(nn.Module):
    """A block with its rotary tables."""

    def __init__(self, layer: nn.Module, rotary: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layer(hidden, attention_mask=None, position_embeddings=self.rotary)


class _End(nn.Sequential):
    """The last norm and the head."""


def _causal_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean loss of predicting each token from those ahead of it."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
