"""What a step of a configuration sends, before anything runs."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ds_lgamp.cost.activations import ActivationBytes
from ds_lgamp.cost.assignment import Demand
from ds_lgamp.cost.traffic import bytes_between_nodes, collective_bytes, hop_bytes
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.megatron_flags import Flags, model_of_flags
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.sizes import as_executed, chunks_of, default_software, units_of
from ds_lgamp.schedule.orders import SINGLE_CHUNK_SCHEDULES
from ds_lgamp.schedule.program import build_rank_program

USUAL_VOCABULARY = 50257
"""Words of a Megatron-LM job whose tokenizer, not a flag, says how many there are: those of GPT-2."""


_OTHER_ORDER = "--use-tp-pp-dp-mapping"
"""Makes pipeline neighbours of ranks that are data-parallel neighbours without it."""


def demand_of(model: Model, configuration: Configuration) -> Demand:
    """Returns what the step sends. Raises ValueError if there are fewer layers than chunks."""
    executed = as_executed(model, configuration)
    executed.layers_of_chunks(model)
    software, ranks, hierarchy = default_software(executed), range(executed.pipeline_ranks), executed.hierarchy
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


def megatron_demand(arguments: Sequence[str], block: Mapping[str, Any], ranks: int) -> Demand:
    """Returns what a step of a Megatron-LM script sends.

    Args:
        arguments: its flags. Context-parallel ranks count as data-parallel ones, as for Megatron-core's gradients.
        block: the keys of the ``ds_lgamp`` block.
        ranks: of the job.

    Raises ValueError if a flag is missing, unknown to the planner, or does not fit ``ranks``.
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
    schedule, layers = block.get("schedule", "layered"), block.get("layers_per_chunk", 1)
    chunks = block.get("chunks_per_rank", model.layers // (layers * pipeline_ranks))
    if schedule in SINGLE_CHUNK_SCHEDULES:
        chunks = 1
    return demand_of(
        model,
        Configuration(
            data_ranks,
            pipeline_ranks,
            tensor_ranks,
            micro_batch,
            max(1, flags.count("--global-batch-size", samples) // samples),
            zero_stage=int(flags.has("--use-distributed-optimizer")),
            schedule=schedule,
            chunks_per_rank=max(1, chunks),
        ),
    )
