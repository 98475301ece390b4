"""What each pipeline rank of a configuration holds: its units, and the bytes of a micro-batch on its chunks."""

from dataclasses import replace
from functools import lru_cache

from ds_lgamp.cost.activations import ActivationBytes, ChunkBytes
from ds_lgamp.cost.memory import Memory, rank_memory
from ds_lgamp.cost.state import UnitSize
from ds_lgamp.cost.storage import aligned
from ds_lgamp.planner.activations import Software, chunk_bytes, end_bytes, layer_bytes, share
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.model import Model
from ds_lgamp.schedule.actions import Action
from ds_lgamp.schedule.program import build_rank_program
from ds_lgamp.schedule.spec import ProgramSpec


def as_executed(model: Model, configuration: Configuration) -> Configuration:
    """Returns the configuration with the same program under the layered schedule. Stock ZeRO-3 is the layered order
    with a chunk for every layer and one micro-batch in a group."""
    if not configuration.micro_batch_outer:
        return configuration
    return replace(configuration, schedule="layered", chunks_per_rank=model.layers, micro_batch_group=1)


def default_software(configuration: Configuration) -> Software:
    """Returns what trains a configuration as :mod:`ds_lgamp.planner.write` starts it: models of transformers, or layers
    of Megatron-core on several tensor-parallel ranks, with sequence parallelism."""
    several = configuration.tensor_ranks > 1
    return Software(fused=several, splits_sequence=several)


def own_chunks(configuration: Configuration, rank: int) -> range:
    """Returns the chunks of a pipeline rank. Every schedule's own placement gives it every P-th one."""
    return range(rank, configuration.chunks, configuration.pipeline_ranks)


def units_of(model: Model, configuration: Configuration, rank: int) -> list[UnitSize]:
    """Returns the units of a pipeline rank, with the elements on one tensor-parallel rank. Tensor-parallel ranks divide
    matrices and the biases of their columns; they all hold norms and other biases."""
    ranks, last = configuration.tensor_ranks, configuration.chunks - 1
    replicated = 2 * model.norm_parameters + (2 * model.hidden_size if model.biases else 0)
    of_layer = share(model.layer_parameters - replicated, ranks) + replicated
    words = share(model.vocabulary_size, ranks) * model.hidden_size
    ends = {chunk: 0 for chunk in (0, last)}
    ends[0] += words + model.position_embeddings * model.hidden_size
    ends[last] += model.norm_parameters + model.extras + (0 if model.tied_embeddings else words)
    units, users = [], []
    for chunk in own_chunks(configuration, rank):
        parameters = layers_of_chunk(model, configuration, chunk) * of_layer
        if chunk in ends and model.tied_embeddings:
            users.append(chunk)
        elif chunk in ends:
            parameters += ends[chunk]
        units.append(UnitSize(aligned(parameters), aligned(parameters), (chunk,)))
    if users:
        # The engine ties everything that precedes and follows the layers.
        tied = aligned(sum(ends.values()))
        units.append(UnitSize(tied, tied, tuple(users), tied=True, copies=min(2, configuration.pipeline_ranks)))
    return units


def chunks_of(model: Model, configuration: Configuration, software: Software, chunks: range) -> list[ChunkBytes]:
    """Returns the bytes of one micro-batch on each of ``chunks``."""
    layer = layer_bytes(model, configuration.micro_batch, configuration.tensor_ranks, software)
    ends = end_bytes(model, configuration.micro_batch, configuration.tensor_ranks, software)
    last = configuration.chunks - 1
    sorts = [
        (layers_of_chunk(model, configuration, chunk), chunk == 0, chunk == last, recomputes(configuration, chunk))
        for chunk in chunks
    ]
    made = {sort: chunk_bytes(layer, ends, *sort) for sort in set(sorts)}
    return [made[sort] for sort in sorts]


def layers_of_chunk(model: Model, configuration: Configuration, chunk: int) -> int:
    """Returns how many layers ``chunk`` has. The first chunks take one more, unless speeds share the layers."""
    if configuration.speeds:
        return configuration.layers_of_chunks(model)[chunk]
    size, larger = divmod(model.layers, configuration.chunks)
    return size + (chunk < larger)


def recomputes(configuration: Configuration, chunk: int) -> bool:
    """Whether ``chunk`` is computed again in its backward. A last chunk that turns at once is not."""
    if configuration.recompute != "full" or chunk < configuration.chunks - 1:
        return configuration.recompute == "full"
    return not _turns_at_once(configuration.spec)


def followed(
    model: Model, configuration: Configuration, rank: int, software: Software, receives_on_arrival: bool = False
) -> Memory:
    """Returns the memory of a pipeline rank by following its program, without token ids and labels."""
    spec = replace(configuration.spec, receives_on_arrival=receives_on_arrival)
    chunks = chunks_of(model, configuration, software, range(configuration.chunks))
    return rank_memory(
        _program(spec, rank),
        units_of(model, configuration, rank),
        configuration.zero_stage,
        configuration.data_ranks,
        software.element,
        all_to_all=software.all_to_all,
        activation_bytes=ActivationBytes(0, 0, chunks, recompute=configuration.recompute == "full"),
        hierarchy=configuration.hierarchy,
        offload=spec.offload,
    )


@lru_cache(maxsize=1024)
def _turns_at_once(spec: ProgramSpec) -> bool:
    return spec.turns_at_once


@lru_cache(maxsize=1024)
def _program(spec: ProgramSpec, rank: int) -> list[Action]:
    """Returns the program of a rank. Configurations with other numbers of data-parallel or tensor-parallel ranks share
    it."""
    return build_rank_program(spec, rank)
