"""Ways to train a GPT.

All use AdamW on fp32 master weights. They sum the gradients of micro-batches in fp32 if they support it.
"""

import contextlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule

import ds_lgamp
from benchmarks.gpt.model import Gpt, batch_of, build_optimizer, layer_specs
from benchmarks.gpt.sizes import GptSize
from benchmarks.record import OURS
from ds_lgamp.integrations.megatron.layers.gpt_layers import language_model_loss
from testing.deepspeed_rank import is_ours

BASELINE = "plain torch"


class Training(Protocol):
    """A training on this device."""

    parameters: int
    """Number of the model's parameters."""

    def step(self) -> torch.Tensor:
        """Trains one batch. Returns its mean loss, on the device."""


class MasterWeights:
    """Weights in fp32 that an optimizer updates in place of a model's own, by gradients summed in fp32. Weights in fp32
    are their own.

    Args:
        weights: of the model, on their device.
        build_optimizer: makes the optimizer of the master weights.
    """

    def __init__(
        self,
        weights: Iterable[torch.Tensor],
        build_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    ) -> None:
        self._weights = list(weights)
        self._masters = [weight.detach().float().requires_grad_() for weight in self._weights]
        for weight, master in zip(self._weights, self._masters):
            master.grad = torch.zeros_like(master)
            weight.register_post_accumulate_grad_hook(partial(_accumulate, master.grad))
        self._optimizer = build_optimizer(self._masters)

    def step(self) -> None:
        """Updates the weights by the gradients of all backward passes since the last step."""
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._masters)


def _accumulate(total: torch.Tensor, weight: torch.Tensor) -> None:
    assert weight.grad is not None, "autograd calls this with a gradient"
    total.add_(weight.grad)
    weight.grad = None


class PlainTorch:
    """A bare loop of plain torch.

    Args:
        size: model and batch.
        recompute: mode of :class:`Gpt`.
        device: where to train.
        dtype: data type of the weights.
        compiled: whether torch compiles every layer by itself.
    """

    def __init__(
        self,
        size: GptSize,
        recompute: str,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        compiled: bool = False,
    ) -> None:
        self.batch = batch_of(size, device)
        with device:
            self.model = Gpt(size, recompute, dtype)
        for layer in self.model.layers if compiled else ():
            layer.compile()
        self.parameters = sum(weight.numel() for weight in self.model.parameters())
        self.masters = MasterWeights(self.model.parameters(), build_optimizer)

    def step(self) -> torch.Tensor:
        losses = []
        for tokens, labels in self.batch:
            loss = self.model(tokens, labels)
            (loss / len(self.batch)).backward()
            losses.append(loss.detach())
        self.masters.step()
        return torch.stack(losses).mean()


class StockDeepSpeed:
    """DeepSpeed's plain engine.

    Args:
        size: model and batch.
        recompute: mode of :class:`Gpt`.
        device: where to train.
        stage: ZeRO stage, 0 or 3. DeepSpeed sums bf16 gradients only in bf16 at stage 0.
        offload: keys of ``zero_optimization`` that say what lies in the memory of the host.
    """

    def __init__(
        self, size: GptSize, recompute: str, device: torch.device, stage: int, offload: Sequence[str] = ()
    ) -> None:
        self.batch = batch_of(size, device)
        with torch.device("cpu") if offload else device:
            model = Gpt(size, recompute)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        config = configuration(size, stage, offload=offload)
        if stage == 3:
            # These are the values of Hugging Face's "auto" for this hidden size. DeepSpeed's defaults are buffers of
            # 5e8 elements.
            config["zero_optimization"] |= {
                "reduce_bucket_size": size.width**2,
                "stage3_prefetch_bucket_size": int(0.9 * size.width**2),
                "stage3_param_persistence_threshold": 10 * size.width,
            }
        else:
            del config["data_types"]
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=build_optimizer(model.parameters()), config=config
        )
        # DeepSpeed has made the state by a step with zero gradients. Adam would count on from it.
        for state in self.engine.optimizer.optimizer.state.values():
            state["step"].zero_()

    def step(self) -> torch.Tensor:
        losses = []
        for tokens, labels in self.batch:
            loss = self.engine(tokens, labels)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()


class Layered:
    """ds_lgamp: layered gradient accumulation with one transformer layer per chunk.

    Args:
        size: model and batch. The data-parallel ranks share its micro-batches.
        recompute: value of the configuration key.
        device: where this rank trains.
        stage: ZeRO stage.
        pipeline_ranks: number of pipeline ranks. All other ranks are data-parallel.
        dtype: data type of the weights.
        offload: keys of ``zero_optimization`` that say what lies in the memory of the host.
        more: further keys of the configuration. Sections join those that are there.
    """

    def __init__(
        self,
        size: GptSize,
        recompute: str,
        device: torch.device,
        stage: int,
        pipeline_ranks: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        offload: Sequence[str] = (),
        more: Mapping[str, Any] | None = None,
    ) -> None:
        data_ranks = dist.get_world_size() // pipeline_ranks
        share = size._replace(micro_batches=size.micro_batches // data_ranks)
        config = configuration(share, stage, dtype, offload) | {"ds_lgamp": {"recompute": recompute}}
        for key, value in (more or {}).items():
            config[key] = {**config.get(key, {}), **value} if isinstance(value, Mapping) else value
        ds_lgamp.install()
        with contextlib.redirect_stdout(io.StringIO()):
            with ds_lgamp.deferred_init() if offload else device:
                module = pipeline_module(size, pipeline_ranks)
            self.parameters = sum(parameter.numel() for parameter in module.parameters())
            self.engine, *_ = deepspeed.initialize(
                model=module,
                optimizer=None if "optimizer" in config else build_optimizer(module.parameters()),
                config=config,
            )
        assert is_ours(self.engine)
        self.batch = batch_of(size, device)[self.engine.grid.data_parallel_id :: data_ranks]

    def step(self) -> torch.Tensor:
        return self.engine.train_batch(iter(self.batch))


class Contender(NamedTuple):
    """A named training. ``build`` takes the size, the recomputation mode and the device, and must be picklable."""

    name: str
    build: Callable[[GptSize, str, torch.device], Training]
    also: tuple[str, ...] = ()
    """Recomputation modes besides those of all contenders."""


CONTENDERS = (
    Contender(BASELINE, PlainTorch, also=("layers",)),
    Contender(f"{OURS}, ZeRO-0", partial(Layered, stage=0)),
    Contender(f"{OURS}, ZeRO-3", partial(Layered, stage=3)),
    Contender("DeepSpeed ZeRO-0", partial(StockDeepSpeed, stage=0)),
    Contender("DeepSpeed ZeRO-3", partial(StockDeepSpeed, stage=3)),
)
"""In running order. The contenders that the targets compare come first, in case time runs out."""


def pipeline_module(size: GptSize, pipeline_ranks: int = 1) -> PipelineModule:
    return PipelineModule(
        layer_specs(size), num_stages=pipeline_ranks, loss_fn=language_model_loss, partition_method="uniform"
    )


def configuration(
    size: GptSize, stage: int, dtype: torch.dtype = torch.bfloat16, offload: Sequence[str] = ()
) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": size.samples,
        "gradient_accumulation_steps": size.micro_batches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": stage, **{key: {"device": "cpu", "pin_memory": True} for key in offload}},
        # All contenders update with torch's fused AdamW, on the host too.
        "zero_force_ds_cpu_optimizer": False,
    }
