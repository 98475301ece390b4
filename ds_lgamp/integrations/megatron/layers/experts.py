"""Mixtures of Megatron-core's experts in pipeline layers: which layers have them, how ranks divide them, what is
refused, and the losses that balance them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.parallel_state import get_expert_model_parallel_world_size
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from ds_lgamp.config import ConfigError
from ds_lgamp.partition.agreement import everyone

# Routers ask for this name whether or not Transformer Engine has brought it.
vars(moe_utils).setdefault("te_general_gemm", None)

_REFUSED = {
    "moe_grouped_gemm": (False, "its kernels need a GPU, on which nobody has tried them"),
    "moe_shared_expert_overlap": (False, "its streams need a GPU, on which nobody has tried them"),
    "moe_router_enable_expert_bias": (False, "no step updates the biases"),
    "moe_enable_routing_replay": (False, "micro-batches would replay each other's routes"),
    "moe_router_force_load_balancing": (False, "tokens would go to experts at random"),
    "moe_router_force_biased": (None, "tokens would go to experts at random"),
    "moe_input_jitter_eps": (None, "tensor-parallel ranks would draw the same noise for different tokens"),
    "moe_latent_size": (None, "nobody has tried it"),
    "calculate_per_token_loss": (False, "losses are means over a micro-batch"),
}
"""For fields of TransformerConfig, the value that works beside experts and why others do not."""


_OF_ONE_MICRO_BATCH = {"aux_loss", "seq_aux_loss", "sinkhorn", "none"}
"""The ways to balance experts that neither count tokens over data-parallel ranks nor keep a state."""


def has_experts(config: TransformerConfig, layer_number: int) -> bool:
    """Returns whether the layer, counted from 1, has experts in the place of a dense MLP. As in Megatron-core, the
    number N in ``moe_layer_freq`` means the first of every N layers, and a list has 1 for each layer with experts."""
    if config.num_moe_experts is None:
        return False
    frequency = config.moe_layer_freq
    return bool(frequency[layer_number - 1]) if isinstance(frequency, list) else (layer_number - 1) % frequency == 0


def refuse_unsupported_experts(config: TransformerConfig, transformer_impl: str) -> None:
    """Raises ConfigError for settings that layers with experts cannot honour."""
    if config.num_moe_experts is None:
        return
    for key, (works, reason) in _REFUSED.items():
        # Other releases may lack the field.
        if (value := getattr(config, key, works)) != works:
            raise ConfigError(f"{key} is {value!r} beside num_moe_experts, but {reason}; set it to {works!r}")
    if config.moe_token_dispatcher_type == "flex":
        raise ConfigError(
            "moe_token_dispatcher_type is 'flex', which needs a GPU and was not tried; use 'alltoall' or 'allgather'"
        )
    kinds = config.moe_router_load_balancing_type
    if unknown := ({kinds} if isinstance(kinds, str) else {*kinds}) - _OF_ONE_MICRO_BATCH:
        raise ConfigError(
            f"moe_router_load_balancing_type is {kinds!r}, but {min(unknown)!r} depends on other micro-batches than a "
            "layer computes; use 'aux_loss' or 'seq_aux_loss'"
        )
    if config.recompute_granularity == "selective" and "moe" in config.recompute_modules:
        raise ConfigError(
            "recompute_modules has 'moe', whose recomputation in the backward pass hides auxiliary losses; remove it, "
            "and set recompute in the ds_lgamp block"
        )
    if isinstance(config.moe_layer_freq, list) and len(config.moe_layer_freq) != config.num_layers:
        raise ConfigError(
            f"moe_layer_freq has {len(config.moe_layer_freq)} numbers, but num_layers is {config.num_layers}; give it "
            "one for each layer"
        )
    if config.add_bias_linear and transformer_impl == "local":
        raise ConfigError(
            "add_bias_linear is True beside num_moe_experts, but without Transformer Engine, Megatron-core adds biases "
            "of experts where autograd lets nothing be changed; set it to False"
        )
    _refuse_ranks(config)


def _refuse_ranks(config: TransformerConfig) -> None:
    experts, ranks = config.num_moe_experts, config.expert_model_parallel_size
    tensor_ranks = config.tensor_model_parallel_size
    if experts % ranks:
        raise ConfigError(
            f"expert_model_parallel_size is {ranks}, which does not divide the {experts} experts; use a divisor"
        )
    if tensor_ranks > 1 and ranks > 1:
        raise ConfigError(
            f"expert_model_parallel_size is {ranks} and tensor_model_parallel_size {tensor_ranks}, which nobody has "
            "tried together; set one of them to 1"
        )
    if config.expert_tensor_parallel_size not in (None, tensor_ranks):
        raise ConfigError(
            f"expert_tensor_parallel_size is {config.expert_tensor_parallel_size}, but experts are sliced as the other "
            f"layers; set it to tensor_model_parallel_size, {tensor_ranks}"
        )
    if tensor_ranks > 1 and not config.sequence_parallel:
        raise ConfigError(
            f"sequence_parallel is False beside num_moe_experts and tensor_model_parallel_size {tensor_ranks}, which "
            "Megatron-core does not train; set it to True"
        )


def refuse_other_expert_ranks(config: TransformerConfig) -> None:
    """Raises ConfigError unless ``config`` has the expert-parallel size of the process groups, by which Megatron-core
    divides experts."""
    given, ranks = config.expert_model_parallel_size, get_expert_model_parallel_world_size()
    if given != ranks:
        raise ConfigError(
            f"expert_model_parallel_size of the TransformerConfig is {given}, but initialize_model_parallel made "
            f"groups of {ranks}; give both the same size"
        )


class Experts(SequentialMLP):
    """The experts that a rank has of a layer whose experts ranks divide.

    With weights drawn on the CPU, ``use_cpu_initialization``, every rank draws the numbers of all experts in their
    order, so that experts have the same values however ranks divide them.
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, *, pg_collection: Any, **options: Any
    ) -> None:
        given, options = (num_local_experts, config), {"pg_collection": pg_collection, **options}
        place, size = pg_collection.ep.rank(), pg_collection.ep.size()
        before, after = (place, size - 1 - place) if config.use_cpu_initialization else (0, 0)
        for _ in range(before):
            SequentialMLP(*given, **options)
        super().__init__(*given, **options)
        for _ in range(after):
            SequentialMLP(*given, **options)
        self.ep_size = size
        """Among how many ranks the experts of the layer are divided."""
        self.first_expert = place * num_local_experts
        """The number, among those of all ranks, of the first of these experts."""
        for parameter in self.parameters():
            # DeepSpeed's name of the ranks that have copies of these experts.
            parameter.group_name = f"ep_size_{size}"  # type: ignore[attr-defined]


def divide(layer: ModuleSpec) -> None:
    """Puts :class:`Experts` in the place of Megatron-core's into the specification of a layer. From release 0.17 on,
    parts of it are partial functions."""
    mlp: Any = layer.submodules.mlp
    parts = mlp.submodules if isinstance(mlp, ModuleSpec) else mlp.keywords["submodules"]
    if isinstance(parts.experts, ModuleSpec):
        parts.experts.module = Experts
    else:
        parts.experts = partial(Experts, **parts.experts.keywords)


class Balance(NamedTuple):
    """An auxiliary loss of a layer: its sum over micro-batches, and their number."""

    total: Tensor | float
    micro_batches: int


@contextmanager
def noting(balances: dict[str, Balance], tensor_ranks: int) -> Iterator[None]:
    """Adds the auxiliary losses that Megatron-core notes inside the block, for one layer, to ``balances`` by name.

    Megatron-core's own notes would count a recomputation once more. ``balances`` belong to the layer, so the runtime
    brings them back after one.
    """
    notes = _notes()
    notes.clear()
    try:
        yield
        for name, note in notes.items():
            values, group = (note[key] if isinstance(note, dict) else getattr(note, key) for key in _NOTED)
            # Some losses are parts, which Megatron-core adds up over these ranks, and others are whole on every one.
            parts = 1 if group is None else tensor_ranks
            before = balances.get(name, Balance(0.0, 0))
            balances[name] = Balance(before.total + values.sum() * parts, before.micro_batches + 1)
    finally:
        notes.clear()


_NOTED = "values", "reduce_group"
"""What Megatron-core notes of an auxiliary loss: its sums by layer, and the ranks that have parts of it."""


def _notes() -> dict[str, Any]:
    """Returns Megatron-core's own notes, by name of the loss. From release 0.18 on, an object has them."""
    tracker = getattr(moe_utils, "get_moe_metrics_tracker", None)
    return moe_utils.get_moe_layer_wise_logging_tracker() if tracker is None else tracker().metrics


def mean_balances(own: Mapping[tuple[str, int], Balance]) -> dict[str, dict[int, float]]:
    """Returns the means over the micro-batches of all ranks, by name and layer, from those of this rank by both.
    Collective over all ranks."""
    sums: dict[tuple[str, int], Balance] = {}
    for rank in everyone({place: Balance(float(each.total), each.micro_batches) for place, each in own.items()}):
        for place, (total, micro_batches) in rank.items():
            before = sums.get(place, Balance(0.0, 0))
            sums[place] = Balance(before.total + total, before.micro_batches + micro_batches)
    means: dict[str, dict[int, float]] = {}
    for (name, layer), (total, micro_batches) in sorted(sums.items()):
        means.setdefault(name, {})[layer] = float(total) / micro_batches
    return means


def scale_auxiliary_losses(factor: float, device: torch.device) -> None:
    """Multiplies the gradients of all auxiliary losses by ``factor`` from now on."""
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.full((), factor, device=device))
