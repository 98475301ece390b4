"""Plans a training run before the engine is built: chunks, placement and program."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

from deepspeed.runtime.pipe.module import PipelineModule, TiedLayerSpec

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.cost.units import Travel
from ds_lgamp.integrations.deepspeed.config.optimizer_choice import known_kind
from ds_lgamp.integrations.deepspeed.config.precision import checks_overflow, travel_of
from ds_lgamp.integrations.deepspeed.config.run_checks import (
    refuse_cast_parameters,
    refuse_irreproducible,
    refuse_needless_rounding,
    refuse_optimizer,
    refuse_unsupported,
)
from ds_lgamp.integrations.deepspeed.config.zero import (
    Home,
    device_of_updates,
    disk_path,
    hierarchy_of,
    home_of_frozen,
    live_folder,
    offload_of,
    refuse_large_copies,
    refuse_offloaded_optimizer,
    regathers_from_host,
    share_of_host,
)
from ds_lgamp.integrations.deepspeed.model.module import (
    Layout,
    Tensors,
    announced_tensors,
    layer_prefix,
    layout_of,
    prefix_of,
)
from ds_lgamp.integrations.program_spec import micro_batch_shares, program_spec
from ds_lgamp.runtime.edges import posts_on_arrival
from ds_lgamp.schedule.placement import Placement
from ds_lgamp.schedule.program import collectives_agree
from ds_lgamp.schedule.spec import Offload, ProgramSpec


class Plan(NamedTuple):
    """What a training run will do."""

    layout: Layout
    replicas: Callable[[int], list[ProgramSpec]]
    """Takes the micro-batches of a rank if all computed equally many. Returns the program of a training step on every
    data-parallel rank. They differ in the number of micro-batches only."""
    specs: list[ProgramSpec]
    """Those for the batch size of ds_config.json."""
    home_of_frozen: Home
    """Where frozen weights lie between uses."""
    travel: Travel
    """What travels rounded."""


def plan_training(
    settings: LgampConfig,
    arguments: dict[str, Any],
    partition_method: str,
    micro_batches: int,
    scales_in_step: bool,
) -> Plan:
    """Returns the layout and the programs that ``settings`` ask for. Collective over all ranks; raises ConfigError on
    every rank if the engine cannot train as asked. Changes nothing.

    Args:
        arguments: those of DeepSpeed's engine: ``model`` is a PipelineModule, ``config`` ds_config.json as the user
            wrote it, ``config_class`` the DeepSpeedConfig, ``optimizer`` what the user passed as such, if anything.
        partition_method: how the module cuts its layers; ``chunks_per_rank`` balances by it.
        micro_batches: those of a batch on a pipeline, if all data-parallel ranks compute equally many.
        scales_in_step: whether the script decides on the factor of the loss after the backward passes.
    """
    module, given, config = arguments["model"], arguments["config"], arguments["config_class"]
    optimizer = arguments.get("optimizer")
    offload = offload_of(given, config)
    travel = travel_of(settings, given, config)
    disk_path(config, settings)
    live_folder(config, settings)
    refuse_unsupported(config, module, optimizer)
    tensors = announced_tensors(module)
    refuse_cast_parameters(config, module, tensors)
    if offload is not None:
        refuse_offloaded_optimizer(config, optimizer)
    refuse_needless_rounding(settings, config, module.num_stages)
    refuse_irreproducible(settings, config, module, tensors)
    refuse_optimizer(settings, config, known_kind(config, optimizer, device_of_updates(config)))
    layout = layout_of(settings, module, partition_method)
    data_ranks = module.topology().get_dim("data")
    if offload is not None:
        offload = share_of_host(config, offload, layout.placement)._replace(alone=data_ranks == 1)
    zero_stage = int(config.zero_optimization_stage)
    updates = _updates(settings, config, scales_in_step, offload)
    hierarchy = hierarchy_of(given, zero_stage, module)
    trained = first_trained(layout, module, tensors)
    others: dict[str, Any] = {"updates": updates, "hierarchy": hierarchy, "offload": offload, "first_trained": trained}
    others["whole_chunks"] = _sharing_chunks(layout, module)
    others["stores_weights"] = regathers_from_host(settings, zero_stage, hierarchy, data_ranks)
    replicas = lru_cache(maxsize=8)(
        partial(replica_specs, settings, layout.placement, data_ranks, zero_stage, **others)
    )
    specs, home = replicas(micro_batches), home_of_frozen(settings, config, layout, module, tensors)
    if others["stores_weights"]:
        refuse_large_copies(config, layout, module, tensors, specs[0], home)
    return Plan(layout, replicas, specs, home, travel)


def _updates(settings: LgampConfig, config: Any, scales_in_step: bool, offload: Offload | None) -> str:
    """Returns when the optimizer updates a chunk: one of ``schedule.spec.UPDATES``."""
    if not settings.overlap_update and offload is None:
        return "step"
    clips = config.gradient_clipping > 0
    may_skip = checks_overflow(config) or settings.nonfinite == "skip"
    needs_all_gradients = clips or may_skip or settings.reproducible
    return "next_step" if needs_all_gradients or scales_in_step else "reduction"


def first_trained(layout: Layout, module: PipelineModule, tensors: Tensors) -> int:
    """Returns the first chunk with a parameter that trains, among the ``tensors`` of all pipeline ranks; the last chunk
    if none has one."""
    trains = {layer_prefix(name) for name, info in tensors.items() if info.is_parameter and info.requires_grad}
    layers = (layer for layer, spec in enumerate(module._layer_specs) if prefix_of(layer, spec) in trains)
    return layout.chunk_of(next(layers, module._num_layers - 1))


def _sharing_chunks(layout: Layout, module: PipelineModule) -> frozenset[int]:
    """Returns the chunks that share a tied module with another chunk of their rank. Its gradient is summed in the order
    of their backwards, which would change if these had two parts."""
    users: dict[tuple[str, int], set[int]] = {}
    for layer, spec in enumerate(module._layer_specs):
        if isinstance(spec, TiedLayerSpec):
            chunk = layout.chunk_of(layer)
            users.setdefault((spec.key, layout.placement[chunk]), set()).add(chunk)
    return frozenset(chunk for chunks in users.values() if len(chunks) > 1 for chunk in chunks)


def replica_specs(
    settings: LgampConfig,
    placement: Placement,
    data_ranks: int,
    zero_stage: int,
    micro_batches: int,
    **others: Any,
) -> list[ProgramSpec]:
    """Returns the program of a training step on every data-parallel rank. Raises ConfigError if the batch does not fit
    the schedule, or if these ranks would gather or reduce in other orders.

    Args:
        micro_batches: those of a rank if all computed equally many.
        others: fields of the specs on which the host decides.
    """
    shares, ranks = micro_batch_shares(settings, micro_batches, data_ranks), max(placement) + 1
    unequal = f"{BLOCK}.data_rank_speeds is {settings.data_rank_speeds}, which makes {min(shares)} to {max(shares)}"
    if settings.schedule == "interleaved_1f1b" and len(set(shares)) > 1 and any(share % ranks for share in shares):
        raise ConfigError(
            f"{unequal} micro-batches of a step, but schedule 'interleaved_1f1b' needs multiples of {ranks} (pipeline "
            "ranks); use 'layered'"
        )
    others["receives_on_arrival"] = posts_on_arrival()
    specs = {share: program_spec(settings, placement, share, zero_stage, **others) for share in sorted({*shares})}
    if data_ranks > 1 and not collectives_agree(specs.values()):
        if settings.split_backward and collectives_agree(replace(spec, split_backward=0) for spec in specs.values()):
            raise ConfigError(
                f"{unequal} micro-batches of a step: with {BLOCK}.split_backward, their ranks would gather and reduce "
                "in other orders; remove split_backward"
            )
        raise ConfigError(
            f"{unequal} micro-batches of a step: at ZeRO stage {zero_stage}, their ranks would gather and reduce in "
            "other orders; use schedule 'layered' and micro_batch_group 'all', or a lower stage"
        )
    return [specs[share] for share in shares]
