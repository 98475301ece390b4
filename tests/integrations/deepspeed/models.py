"""The test model as DeepSpeed layer specifications, and its training on one process without parallelism."""

from typing import NamedTuple

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from tests.runtime.models import WIDTH, AddMask, Embedding, TupleBlock, drop_mask, loss_function, micro_batch

BASE_SEED = 50
MICRO_BATCHES = 4


def tied_logits(embedding: Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ embedding.weight.T


def layer_specs(training: "Training") -> list:
    """Returns an embedding, blocks and a head. Tuples may travel between blocks, and some layers are functions."""
    if training.tied:
        embedding = TiedLayerSpec("embedding", Embedding)
        head = TiedLayerSpec("embedding", Embedding, forward_fn=tied_logits)
    else:
        embedding, head = LayerSpec(Embedding), LayerSpec(nn.Linear, WIDTH, 11)
    body = [LayerSpec(TupleBlock) for _ in range(training.blocks)]
    if not training.tuples:
        return [embedding, LayerSpec(nn.Dropout, training.dropout), *body, head]
    return [embedding, body[0], LayerSpec(AddMask), *body[1:], drop_mask, head]


def seed(value: int) -> None:
    """Seeds torch. DeepSpeed passes NumPy integers, which its own seeding refuses."""
    torch.manual_seed(int(value))


def pipeline_module(training: "Training", pipeline_ranks: int) -> PipelineModule:
    return PipelineModule(
        layer_specs(training),
        num_stages=pipeline_ranks,
        loss_fn=loss_function,
        seed_layers=True,
        seed_fn=seed,
        base_seed=BASE_SEED,
    )


class Training(NamedTuple):
    """The settings of a training that do not depend on the layout."""

    blocks: int = 8
    tied: bool = False
    tuples: bool = True
    """Stock DeepSpeed takes no tuple with a floating-point tensor that needs no gradient."""
    dropout: float = 0.0
    """Dropout after the embedding. Only without tuples."""
    momentum: float = 0.0
    decay: float = 0.0
    """Weight decay of matrices; vectors have none."""
    clipping: float = 0.0
    warmup: int = 0
    """Steps over which the learning rate rises linearly."""
    learning_rate: float = 0.02
    steps: int = 6


class Reference(NamedTuple):
    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, torch.Tensor]]
    parameters: dict[str, torch.Tensor]
    evaluation: float


def scaled_weights(named_parameters) -> None:
    """Changes weights, as a user does who loads them before ``deepspeed.initialize``."""
    with torch.no_grad():
        for name, parameter in named_parameters:
            if name.endswith("inner.weight"):
                parameter.mul_(1.25)


def decay_groups(parameters, decay: float) -> list[dict]:
    """Makes parameter groups. Matrices decay and vectors do not. The vocabulary's matrices have a group that is empty
    on middle ranks."""
    parameters = list(parameters)
    vocabulary = [parameter for parameter in parameters if parameter.shape[0] == 11 and parameter.dim() > 1]
    matrices = [parameter for parameter in parameters if parameter.shape[0] != 11 and parameter.dim() > 1]
    return [
        {"params": vocabulary, "weight_decay": decay / 2},
        {"params": matrices, "weight_decay": decay},
        {"params": [parameter for parameter in parameters if parameter.dim() <= 1], "weight_decay": 0.0},
    ]


def warmup_factors(steps: int) -> list:
    """Returns one function per group, because torch's scheduler counts them."""
    return [lambda step: min(1.0, (step + 1) / max(1, steps))] * 3


def train_reference(training: Training, data_ranks: int) -> Reference:
    """Trains with SGD on one process over the micro-batches of all data-parallel ranks. Parameters have global
    names."""
    layers, parameters = build_layers(training)
    optimizer = torch.optim.SGD(
        decay_groups(parameters.values(), training.decay), lr=training.learning_rate, momentum=training.momentum
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_factors(training.warmup))
    reference = Reference([], [], [], parameters, 0.0)
    count = MICRO_BATCHES * data_ranks
    for step in range(training.steps):
        losses = [loss_of(layers, step, index) / count for index in range(count)]
        for loss in losses:
            loss.backward()
        reference.losses.append(sum(loss.item() for loss in losses))
        reference.gradients.append({name: parameter.grad.clone() for name, parameter in parameters.items()})
        limit = training.clipping or float("inf")
        reference.norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    with torch.no_grad():
        evaluation = sum(loss_of(layers, 99, index).item() for index in range(count)) / count
    return reference._replace(evaluation=evaluation)


def build_layers(training: Training, specs: list | None = None) -> tuple[list, dict[str, nn.Parameter]]:
    """Builds the layers with the weights of ``pipeline_module``. Returns them and their parameters by global name.

    ``specs`` replaces the training's layers.
    """
    built: list = []
    tied: dict[str, nn.Module] = {}
    parameters: dict[str, nn.Parameter] = {}
    for index, spec in enumerate(layer_specs(training) if specs is None else specs):
        seed(BASE_SEED + index)
        if isinstance(spec, TiedLayerSpec):
            if spec.key not in tied:
                tied[spec.key] = spec.build()
                parameters.update(
                    (f"tied_modules.{spec.key}.{name}", tensor) for name, tensor in tied[spec.key].named_parameters()
                )
            module = tied[spec.key]
            built.append(module if spec.forward_fn is None else lambda x, m=module, f=spec.forward_fn: f(m, x))
        elif isinstance(spec, LayerSpec):
            built.append(spec.build())
            parameters.update((f"{index}.{name}", tensor) for name, tensor in built[-1].named_parameters())
        else:
            built.append(spec)
    scaled_weights(parameters.items())
    return built, parameters


def loss_of(layers: list, step: int, index: int) -> torch.Tensor:
    hidden, labels = micro_batch(step, index)
    for layer in layers:
        hidden = layer(hidden)
    return loss_function(hidden, labels)
