"""Models in a training loop of one's own: trained by plain torch in one process, and under DeepSpeed on all ranks."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import ds_lgamp
from benchmarks.gpt.contenders import MasterWeights
from benchmarks.gpu_day import own_models
from benchmarks.gpu_day.equality import PRECISIONS, STEPS, compared, device
from benchmarks.gpu_day.own_models import MICRO_BATCHES, SAMPLES, Arguments
from testing.deepspeed_rank import is_ours


class OwnLoop(NamedTuple):
    """What the script of a user has."""

    model: Callable[[], nn.Module]
    """Makes the model in fp32."""
    batch: Callable[[int], Arguments]
    """Makes the batch of every step for a number of ranks."""
    loss: Callable[[Any, Arguments], torch.Tensor]
    """Takes the loss from what the model returns for a micro-batch."""
    block: Mapping[str, Any] = {}
    precision: str = "fp32"

    def compared(self, pipeline_ranks: int) -> dict[str, Any]:
        """Trains on all ranks. Returns the losses beside those of plain torch in this process."""
        batch = {key: tensor.to(device()) for key, tensor in self.batch(dist.get_world_size()).items()}
        losses = self._losses_of_engine(batch, pipeline_ranks)
        return compared(losses, self._losses_of_plain_torch(batch), self.precision)

    def _made(self) -> nn.Module:
        torch.manual_seed(0)
        return self.model().to(PRECISIONS[self.precision][0])

    def _losses_of_plain_torch(self, batch: Arguments) -> list[float]:
        """Trains the whole batch in this process."""
        model = self._made().to(device())
        masters = MasterWeights((weight for weight in model.parameters() if weight.requires_grad), build_optimizer)
        ranks = range(dist.get_world_size())
        micro_batches = [_at(batch, rank, number) for rank in ranks for number in range(MICRO_BATCHES)]
        found = []
        for _ in range(STEPS):
            total = torch.zeros((), device=device())
            for each in micro_batches:
                loss = self.loss(model(**each), each) / len(micro_batches)
                loss.backward()
                total += loss.detach()
            masters.step()
            found.append(total.item())
        return found

    def _losses_of_engine(self, batch: Arguments, pipeline_ranks: int) -> list[float]:
        """Trains this rank's part of the batch. Returns the mean losses of all ranks."""
        ds_lgamp.install()
        model = self._made()
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=build_optimizer(weight for weight in model.parameters() if weight.requires_grad),
            config={
                "train_micro_batch_size_per_gpu": SAMPLES,
                "gradient_accumulation_steps": MICRO_BATCHES,
                "gradient_clipping": 0.0,
                "bf16": {"enabled": self.precision == "bf16"},
                "data_types": {"grad_accum_dtype": "fp32"},
                "zero_optimization": {"stage": 3},
                "ds_lgamp": {"pipeline_ranks": pipeline_ranks, **self.block},
            },
        )
        assert is_ours(engine)
        engine.train()
        found = []
        for _ in range(STEPS):
            total = torch.zeros((), device=device())
            for number in range(MICRO_BATCHES):
                each = _at(batch, dist.get_rank(), number)
                loss = self.loss(engine(**each), each)
                engine.backward(loss)
                engine.step()
                total += loss.detach() / MICRO_BATCHES
            dist.all_reduce(total)
            found.append(total.item() / dist.get_world_size())
        return found


def _at(batch: Arguments, rank: int, number: int) -> Arguments:
    return {key: tensor[rank, number] for key, tensor in batch.items()}


def build_optimizer(weights: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=1e-3, eps=1e-3)


def _own_loss(outputs: Any, arguments: Arguments) -> torch.Tensor:
    return outputs.loss


def _smoothed(outputs: Any, arguments: Arguments) -> torch.Tensor:
    """Returns a loss that the model does not have."""
    logits = outputs.logits[:, :-1].float().transpose(1, 2)
    return functional.cross_entropy(logits, arguments["input_ids"][:, 1:], label_smoothing=0.1)


LOOPS = {
    "transformers": OwnLoop(own_models.llama, own_models.text, _own_loss),
    "transformers, bf16": OwnLoop(own_models.llama, own_models.text, _own_loss, precision="bf16"),
    "transformers, frozen below": OwnLoop(own_models.frozen_below, own_models.text, _own_loss),
    "transformers, outputs all": OwnLoop(own_models.llama, own_models.without_labels, _smoothed, {"outputs": "all"}),
    "transformers, images": OwnLoop(own_models.llava, own_models.with_images, _own_loss, precision="bf16"),
    "transformers, images behind blocks": OwnLoop(own_models.qwen3_vl, own_models.with_grids, _own_loss),
    "transformers, an encoder": OwnLoop(own_models.t5, own_models.text, _own_loss),
    "a model of one's own": OwnLoop(own_models.OwnModel, own_models.text, lambda loss, arguments: loss),
}
"""By name. In bf16, attention is flash attention on a GPU."""
