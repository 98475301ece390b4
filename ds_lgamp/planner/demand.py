"""What a step of a configuration sends, before anything runs."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ds_lgamp.config import LgampConfig, read_block
from ds_lgamp.cost.activations import ActivationBytes
from ds_lgamp.cost.assignment import Demand
from ds_lgamp.cost.traffic import bytes_between_nodes, collective_bytes, hop_bytes
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.megatron_flags import Flags, model_of_flags
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.sizes import as_executed, chunks_of, default_software, units_of
from ds_lgamp.schedule.hierarchy import Hierarchy
from ds_lgamp.schedule.orders import SINGLE_CHUNK_SCHEDULES
from ds_lgamp.schedule.program import build_rank_program

USUAL_VOCABULARY = 50257
"""Words of a Megatron-LM job whose tokenizer, not a flag, says how many there are: those of GPT-2."""


_OTHER_ORDER = "--use-tp-pp-dp-mapping"
"""Makes pipeline neighbours of ranks that are data-parallel neighbours without it."""


def demand_of(model: Model, configuration: Configuration, splits_sequence: bool = True) -> Demand:
    """Returns what the step sends. Raises ValueError if there are fewer layers than chunks.

    Args:
        splits_sequence: whether tensor-parallel ranks use sequence parallelism, so that each sends a part of a result.
    """
    executed = as_executed(model, configuration)
    executed.layers_of_chunks(model)
    software = replace(default_software(executed), splits_sequence=splits_sequence)
    ranks, hierarchy = range(executed.pipeline_ranks), executed.hierarchy
    activations = ActivationBytes(0, 0, chunks_of(model, executed, software, range(executed.chunks)))
    programs = [build_rank_program(executed.spec, rank) for rank in ranks]
    units, size, data_ranks = [units_of(model, executed, rank) for rank in ranks], software.element, executed.data_ranks
    return Demand(
        executed.pipeline_ranks,
        data_ranks,
        executed.tensor_ranks,
        data_bytes=tuple(
            sum(collective_bytes(program, unit, executed.zero_stage, data_ranks, size, hierarchy) for unit in own)
            for program, own in zip(programs, units)
        ),
        hop_bytes=tuple(hop_bytes(rank, executed.placement, executed.micro_batches, activations) for rank in ranks),
        hierarchy=hierarchy,
        peer_bytes=()
        if hierarchy is None
        else tuple(
            sum(bytes_between_nodes(program, unit, data_ranks, size, hierarchy) for unit in own)
            for program, own in zip(programs, units)
        ),
    )


def demand_of_facts(facts: Mapping[str, Any]) -> Demand:
    """Returns what the step sends of which ``ds_lgamp run --explain --json`` prints ``facts``. Messages of unknown size
    count as none."""
    ranks = facts["ranks"]
    hierarchy = None if facts["hierarchy"] is None else Hierarchy(**facts["hierarchy"])
    return Demand(
        facts["pipeline_ranks"],
        facts["data_ranks"],
        facts["tensor_ranks"],
        tuple(rank["collective_bytes_sent"] for rank in ranks),
        tuple(rank["hop_bytes"] or 0 for rank in ranks),
        hierarchy=hierarchy,
        peer_bytes=() if hierarchy is None else tuple(rank["bytes_between_nodes"] for rank in ranks),
        micro_batch_shares=tuple(facts["micro_batch_shares"]),
        order=facts.get("order", ""),
    )


def facts_of(demand: Demand) -> dict[str, Any]:
    """Returns as much of what ``--explain --json`` prints as :func:`demand_of_facts` reads, and the order of ranks."""
    peer_bytes = demand.peer_bytes or (0,) * demand.pipeline_ranks
    return {
        "pipeline_ranks": demand.pipeline_ranks,
        "data_ranks": demand.data_ranks,
        "tensor_ranks": demand.tensor_ranks,
        "hierarchy": None if demand.hierarchy is None else demand.hierarchy._asdict(),
        "micro_batch_shares": list(demand.micro_batch_shares),
        "order": demand.order,
        "ranks": [
            {"collective_bytes_sent": data, "hop_bytes": hop, "bytes_between_nodes": peers}
            for data, hop, peers in zip(demand.data_bytes, demand.hop_bytes, peer_bytes, strict=True)
        ],
    }


def megatron_demand(arguments: Sequence[str], config: Mapping[str, Any], ranks: int) -> Demand:
    """Returns what a step of a Megatron-LM script sends.

    Args:
        arguments: its flags. Context-parallel ranks count as data-parallel ones, as for Megatron-core's gradients.
        config: what the configuration file holds.
        ranks: of the job.

    Raises ValueError if a flag is missing, unknown to the planner, or does not fit ``ranks``, or if the block is wrong.
    """
    text = shlex.join(arguments)
    flags = Flags(text)
    if flags.has(_OTHER_ORDER):
        raise ValueError(
            f"{_OTHER_ORDER} is given, but a cluster file lays ranks out with pipeline ranks furthest apart; remove it"
        )
    if not flags.has("--vocab-size"):
        text += f" --vocab-size {USUAL_VOCABULARY}"
    model = model_of_flags("flags", text)
    pipeline_ranks = flags.count("--pipeline-model-parallel-size", 1)
    tensor_ranks = flags.count("--tensor-model-parallel-size", 1)
    context_ranks = flags.count("--context-parallel-size", 1)
    data_ranks, rest = divmod(ranks, pipeline_ranks * tensor_ranks)
    if rest or data_ranks % context_ranks:
        raise ValueError(
            f"--pipeline-model-parallel-size {pipeline_ranks}, --tensor-model-parallel-size {tensor_ranks} and "
            f"--context-parallel-size {context_ranks} do not divide {ranks} ranks; change one of them"
        )
    micro_batch = flags.count("--micro-batch-size", 1)
    samples = micro_batch * (data_ranks // context_ranks)
    block = read_block(dict(config)) or LgampConfig()
    return demand_of(
        model,
        Configuration(
            data_ranks,
            pipeline_ranks,
            tensor_ranks,
            micro_batch,
            max(1, flags.count("--global-batch-size", samples) // samples),
            zero_stage=(config.get("zero_optimization") or {}).get("stage") or 0,
            schedule=block.schedule,
            chunks_per_rank=_chunks_per_rank(flags, block, model.layers, pipeline_ranks),
            resident_chunks=block.resident_chunks,
            micro_batch_group=None if block.micro_batch_group == "all" else block.micro_batch_group,
        ),
        flags.has("--sequence-parallel"),
    )


def _chunks_per_rank(flags: Flags, block: LgampConfig, layers: int, pipeline_ranks: int) -> int:
    """Returns how many chunks each rank has by the flags, else by the block."""
    if block.schedule in SINGLE_CHUNK_SCHEDULES:
        return 1
    each = flags.count("--num-layers-per-virtual-pipeline-stage", block.layers_per_chunk or 1)
    by_layers = max(1, layers // (each * pipeline_ranks))
    if flags.has("--num-layers-per-virtual-pipeline-stage"):
        return by_layers
    return flags.count("--num-virtual-stages-per-pipeline-rank", block.chunks_per_rank or by_layers)
