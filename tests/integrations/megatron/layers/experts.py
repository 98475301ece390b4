"""A small GPT with Megatron-core's experts: its training in one process in plain torch, and on ranks by an engine."""

from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import groups

import ds_lgamp
from ds_lgamp.partition.agreement import everyone
from testing.deepspeed_rank import prepare_rank, quiet
from tests.integrations.deepspeed.models import BASE_SEED, seed
from tests.integrations.megatron.on_cpu import start_megatron
from tests.runtime.assembly import gathered

VOCABULARY, SEQUENCE, MICRO_BATCHES, STEPS = 64, 16, 4, 3
"""The micro-batches of a step are those of all data-parallel ranks."""
EXPERTS = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "init_method_std": 0.2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
    "add_bias_linear": False,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_ffn_hidden_size": 24,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
    "moe_token_dispatcher_type": "alltoall",
}
PARALLEL = {
    *("tensor_model_parallel_size", "sequence_parallel", "expert_model_parallel_size", "moe_token_dispatcher_type"),
}


class Place(NamedTuple):
    """Where a model is trained, and which."""

    pipeline_ranks: int = 1
    data_ranks: int = 1
    stage: int = 0
    recompute: str = "none"
    loss_scale: float = 1.0
    options: tuple[tuple[str, Any], ...] = ()
    """Those of the TransformerConfig that differ from EXPERTS, with tuples in the place of lists."""

    @property
    def tensor_ranks(self) -> int:
        return dict(self.options).get("tensor_model_parallel_size", 1)

    @property
    def ranks(self) -> int:
        return self.pipeline_ranks * self.data_ranks * self.tensor_ranks

    @property
    def model(self) -> tuple[tuple[str, Any], ...]:
        """What decides on the training in one process."""
        return tuple(option for option in self.options if option[0] not in PARALLEL)


class Step(NamedTuple):
    loss: float
    norm: float
    balances: dict[str, dict[int, float]]
    """The auxiliary losses by name and layer."""
    gradients: dict[str, torch.Tensor]
    """By name in the checkpoint."""


def layer_specs(options):
    from megatron.core.transformer import TransformerConfig

    from ds_lgamp.integrations.megatron.layers.gpt_layers import gpt_layer_specs

    given = EXPERTS | {name: list(value) if isinstance(value, tuple) else value for name, value in options}
    start_megatron(given.get("tensor_model_parallel_size", 1), given.get("expert_model_parallel_size", 1))
    return gpt_layer_specs(TransformerConfig(**given), VOCABULARY, SEQUENCE, "rope", tie_embeddings=False)


def micro_batch(step: int, number: int):
    generator = torch.Generator().manual_seed(MICRO_BATCHES * step + number)
    tokens = torch.randint(0, VOCABULARY, (2, SEQUENCE + 1), generator=generator)
    return tokens[:, :-1].contiguous(), (tokens[:, 1:].contiguous(), torch.ones(2, SEQUENCE))


def optimizer_of(parameters) -> torch.optim.Optimizer:
    # Adam would make large steps of the rounding of small gradients, and tokens would choose other experts.
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.5)


def train_alone(options) -> list[Step]:
    """Trains in plain torch. Megatron-core adds the gradients of auxiliary losses to those of a micro-batch's loss, so
    both are divided by the number of micro-batches."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from ds_lgamp.integrations.megatron.layers.gpt_layers import language_model_loss

    layers = []
    for number, spec in enumerate(layer_specs(options)):
        seed(BASE_SEED + number)
        layers.append(spec.build())
    parameters = dict(torch.nn.ModuleList(layers).named_parameters())
    optimizer, steps = optimizer_of(parameters.values()), []
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(()))
    for step in range(STEPS):
        total = 0.0
        for number in range(MICRO_BATCHES):
            hidden, labels = micro_batch(step, number)
            for layer in layers:
                hidden = of_megatron(layer, hidden) if hasattr(layer, "layer") else layer(hidden)
            loss = language_model_loss(hidden, labels)
            loss.backward()
            total += loss.item() / MICRO_BATCHES
        for parameter in parameters.values():
            # Experts without tokens may have none.
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / MICRO_BATCHES
        gradients = {name: parameter.grad.clone() for name, parameter in parameters.items()}
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
        steps.append(Step(total, norm, noted_losses(), gradients))
        optimizer.step()
        optimizer.zero_grad()
    return steps


def of_megatron(block, hidden):
    """Calls Megatron-core's layer without what a TransformerBlock notes of it."""
    from ds_lgamp.integrations.megatron.layers.transformer_block import rotary_angles

    angles = rotary_angles(block.rotary, SEQUENCE, hidden.device)
    return block.layer(hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles)[0]


def noted_losses() -> dict[str, dict[int, float]]:
    """Returns the means of the auxiliary losses that Megatron-core has noted, by name and layer, and forgets them."""
    from megatron.core.transformer.moe import moe_utils

    if hasattr(moe_utils, "get_moe_metrics_tracker"):  # release 0.18 and later
        notes = moe_utils.get_moe_metrics_tracker().metrics
        values = {name: note.values for name, note in notes.items()}
    else:
        notes = moe_utils.get_moe_layer_wise_logging_tracker()
        values = {name: note["values"] for name, note in notes.items()}
    found = {
        name: {layer: total / MICRO_BATCHES for layer, total in enumerate(totals.tolist(), 1) if total}
        for name, totals in values.items()
    }
    notes.clear()
    return found


def engine_of(place: Place, forgets: bool = True, **config):
    """Returns the engine at a place.

    Args:
        forgets: whether DeepSpeed's groups of experts are forgotten, which otherwise stay those of the first engine.
        config: more of the configuration.
    """
    from ds_lgamp.integrations.megatron.layers.gpt_layers import language_model_loss

    ds_lgamp.install()
    for name in ("_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP") if forgets else ():
        getattr(groups, name).clear()
    with quiet():
        module = PipelineModule(
            layer_specs(place.options),
            topology=PipeModelDataParallelTopology(place.pipeline_ranks, place.tensor_ranks, place.data_ranks),
            loss_fn=language_model_loss,
            seed_layers=True,
            seed_fn=seed,
            base_seed=BASE_SEED,
        )
        engine = deepspeed.initialize(
            model=module,
            optimizer=optimizer_of(module.parameters()),
            config={
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": MICRO_BATCHES // place.data_ranks,
                "gradient_clipping": 1e9,
                "zero_optimization": {"stage": place.stage},
                "zero_allow_untested_optimizer": True,
                "ds_lgamp": {"recompute": place.recompute, "layers_per_chunk": 2},
                **config,
            },
        )[0]
    engine.optimizer.override_loss_scale(place.loss_scale)
    return engine


def train(engine, steps=range(STEPS)) -> list[Step]:
    """Trains ``steps``. Returns them with the gradients of all ranks, which tensor-parallel ranks have in slices."""
    from ds_lgamp.integrations.megatron.layers.gpt_layers import auxiliary_losses

    found, recorded, step_optimizer = [], {}, engine.optimizer.step

    def recording_step():
        own = gathered(engine.optimizer.partition, lambda unit: unit.reduction.shard_gradient)
        scale = engine.optimizer.loss_scale
        recorded.update({name: value / scale for rank in everyone(own) for name, value in rank.items()})
        step_optimizer()

    engine.optimizer.step = recording_step
    first, count = engine.grid.data_parallel_id * engine.micro_batches, engine.micro_batches
    for step in steps:
        loss = engine.train_batch(iter([micro_batch(step, first + index) for index in range(count)])).item()
        balances = auxiliary_losses(engine.module)
        found.append(Step(loss, float(engine.get_global_grad_norm()), balances, dict(recorded)))
    return found


def train_places(places):
    """Returns the steps at every place, of rank 0 and, on one rank, of every model in plain torch."""
    prepare_rank()
    results = {}
    for place in places:
        if place.ranks == 1:
            results[place.model] = train_alone(place.model)
        results[place] = train(engine_of(place))
    return results if dist.get_rank() == 0 else None
