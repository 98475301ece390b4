"""Ways to train a GPT whose optimizer state, and mostly parameters too, lie in the memory of the host."""

from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from benchmarks.gpt.contenders import Contender, Layered, StockDeepSpeed
from benchmarks.gpt.model import Gpt, batch_of, build_optimizer
from benchmarks.gpt.sizes import GptSize
from benchmarks.record import OURS

OPTIMIZER, PARAMETERS = "offload_optimizer", "offload_param"
"""DeepSpeed's keys."""
IN_MEMORY, ON_HOST = f"{OURS}, all on the device", f"{OURS}, all on the host"
OPTIMIZER_ON_HOST = f"{OURS}, optimizer on the host"
DEEPSPEED = "DeepSpeed ZeRO-3, all on the host"
STATE_IN_BF16 = f"{ON_HOST}, state in bf16"
FSDP2_IN_MEMORY, FSDP2_ON_HOST = "FSDP2, all on the device", "FSDP2, all on the host"
DEFERRED = f"{FSDP2_ON_HOST}, deferred sync"


class Fsdp2:
    """FSDP2 with one group per layer. The sharded weights are in fp32; compute is in bf16.

    Args:
        size: model and batch.
        recompute: mode of :class:`Gpt`.
        device: where to train.
        offload: whether weights, gradients and optimizer state lie in the memory of the host.
        deferred_sync: whether gradients add up on the device, and are reduced and moved once per batch.
    """

    def __init__(
        self, size: GptSize, recompute: str, device: torch.device, offload: bool, deferred_sync: bool = False
    ) -> None:
        self.batch = batch_of(size, device)
        self.deferred_sync = deferred_sync
        with torch.device("cpu") if offload else device:
            self.model = Gpt(size, recompute).float()
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        shard = partial(
            fully_shard,
            mesh=init_device_mesh(device.type, (dist.get_world_size(),)),
            # The mask of the loss stays in fp32.
            mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False),
            offload_policy=CPUOffloadPolicy(pin_memory=device.type != "cpu") if offload else OffloadPolicy(),
        )
        for layer in self.model.layers:
            shard(layer)
        shard(self.model)
        self.optimizer = build_optimizer(self.model.parameters())

    def step(self) -> torch.Tensor:
        losses = []
        for number, (tokens, labels) in enumerate(self.batch, 1):
            self.model.set_requires_gradient_sync(not self.deferred_sync or number == len(self.batch))
            loss = self.model(tokens, labels)
            (loss / len(self.batch)).backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean()


ALL = (OPTIMIZER, PARAMETERS)
UNCHECKED = {"bf16": {"check_grad_overflow": False}}
"""By default an update waits until all gradients are known to be finite."""
IN_BF16 = {
    "bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
    "ds_lgamp": {"stochastic_rounding": True},
}
"""Eight bytes of the host for each parameter in place of 18."""
CONTENDERS = (
    Contender(IN_MEMORY, partial(Layered, stage=3)),
    Contender(ON_HOST, partial(Layered, stage=3, offload=ALL)),
    Contender(DEEPSPEED, partial(StockDeepSpeed, stage=3, offload=ALL)),
    Contender(FSDP2_IN_MEMORY, partial(Fsdp2, offload=False)),
    Contender(f"{ON_HOST}, gradients unchecked", partial(Layered, stage=3, offload=ALL, more=UNCHECKED)),
    Contender(STATE_IN_BF16, partial(Layered, stage=3, offload=ALL, more=IN_BF16)),
    Contender(OPTIMIZER_ON_HOST, partial(Layered, stage=3, offload=[OPTIMIZER])),
    Contender(DEFERRED, partial(Fsdp2, offload=True, deferred_sync=True)),
    Contender(FSDP2_ON_HOST, partial(Fsdp2, offload=True)),
)
"""In running order: what the targets compare comes first."""
