"""Models with frozen parameters, their engines, and their training on one process."""

from typing import NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_lgamp
from testing.deepspeed_rank import quiet
from tests.integrations.deepspeed.models import (
    BASE_SEED,
    MICRO_BATCHES,
    Training,
    build_layers,
    loss_of,
    seed,
    tied_logits,
)
from tests.partition.rounding import rounded
from tests.runtime.models import WIDTH, Embedding, loss_function

STEPS, CLIPPING = 3, 0.05
OPTIONS = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1}


class Adapted(nn.Module):
    """A residual block with a frozen matrix and two small ones that train."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.adapter_down = nn.Linear(WIDTH, 2, bias=False)
        self.adapter_up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, inputs):
        return inputs + torch.tanh(self.base(inputs) + self.adapter_up(self.adapter_down(inputs)))


class Checkpointed(Adapted):
    """Checkpoints itself with torch's reentrant variant, which trains only if its input requires a gradient."""

    def forward(self, inputs):
        return checkpoint(super().forward, inputs, use_reentrant=True)


def begins_gradients(inputs):
    """Lets gradients begin here, as enable_input_require_grads of transformers does for such layers."""
    return torch.tanh(inputs).requires_grad_()


class Head(nn.Module):
    """A head whose bias trains."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(WIDTH, 11, bias=False)
        self.adapter_bias = nn.Parameter(torch.zeros(11))

    def forward(self, inputs):
        return self.matrix(inputs) + self.adapter_bias


class AdaptedEmbedding(Embedding):
    """The embedding at both ends. Its gain trains."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter_gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens):
        return super().forward(tokens) * self.adapter_gain


def gained_logits(embedding, hidden):
    return (hidden * embedding.adapter_gain) @ embedding.weight.T


def tied(kind, head):
    return TiedLayerSpec("embedding", kind), TiedLayerSpec("embedding", kind, forward_fn=head)


ENDS = {
    "untied": (LayerSpec(Embedding), LayerSpec(Head)),
    "tied": tied(Embedding, tied_logits),
    "tied adapted": tied(AdaptedEmbedding, gained_logits),
}


def specs_of(model):
    """Returns layers of one chunk each. The first and the third have nothing to train, and the fourth has no
    parameters. Of the model "upper", only the last three chunks get gradients, of which one is frozen."""
    if model == "idle":
        return [LayerSpec(Embedding), LayerSpec(Head)]
    if model == "upper":
        frozen = LayerSpec(Embedding), LayerSpec(nn.Linear, WIDTH, WIDTH), begins_gradients
        return [*frozen, LayerSpec(Checkpointed), LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(Head)]
    first, last = ENDS[model]
    blocks = [LayerSpec(Adapted) for _ in range(3)]
    return [first, blocks[0], LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh, *blocks[1:], last]


def freeze(named_parameters):
    for name, parameter in named_parameters:
        parameter.requires_grad_("adapter" in name)


def of_a_subset(named_parameters):
    """Returns trainable parameters without the last block's second matrix. It trains, but no optimizer owns it."""
    return [parameter for name, parameter in named_parameters if parameter.requires_grad and "5.adapter_up" not in name]


class Case(NamedTuple):
    model: str
    pipeline_ranks: int
    stage: int
    optimizer: str
    """json: over trainable parameters; client: over all parameters; subset: without one matrix."""
    block: dict
    zero: dict = {}
    """More keys of zero_optimization."""


def module_of(model, pipeline_ranks):
    with quiet():
        module = PipelineModule(
            specs_of(model),
            num_stages=pipeline_ranks,
            loss_fn=loss_function,
            seed_layers=True,
            seed_fn=seed,
            base_seed=BASE_SEED,
        )
    freeze(module.named_parameters())
    return module


def config_of(case, **settings):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": case.stage, **case.zero},
        "ds_lgamp": {"layers_per_chunk": 1, "keep_frozen": "none", **case.block},
        **settings,
    }
    return config | ({"optimizer": {"type": "SGD", "params": OPTIONS}} if case.optimizer == "json" else {})


def engine_of(case, module=None, **settings):
    ds_lgamp.install()
    module = module_of(case.model, case.pipeline_ranks) if module is None else module
    optimizer = None
    if case.optimizer == "client":
        optimizer = torch.optim.SGD(module.parameters(), **OPTIONS)
    elif case.optimizer == "subset":
        optimizer = torch.optim.SGD(of_a_subset(list(module.named_parameters())), **OPTIONS)
    with quiet():
        return deepspeed.initialize(model=module, optimizer=optimizer, config=config_of(case, **settings))[0]


def reference(case, rounds_frozen=False):
    """Returns losses, norms and parameters of one process, and the parameters at the beginning. ``rounds_frozen``
    rounds the frozen ones by hand."""
    layers, parameters = build_layers(Training(), specs_of(case.model))
    freeze(parameters.items())
    first = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for parameter in parameters.values():
        if rounds_frozen and not parameter.requires_grad:
            parameter.data = rounded(parameter.data, 8)
    owned = [parameter for parameter in parameters.values() if parameter.requires_grad]
    if case.optimizer == "subset":
        owned = of_a_subset(parameters.items())
    optimizer = torch.optim.SGD(owned, **OPTIONS)
    count = MICRO_BATCHES * dist.get_world_size() // case.pipeline_ranks
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = sum(loss_of(layers, step, index) for index in range(count)) / count
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(owned, CLIPPING).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, parameters, first
