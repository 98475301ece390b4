"""How much memory a configuration needs on the GPU that needs most, by the formula of :mod:`ds_lgamp.cost.memory`.

The formula follows the program of a rank, so a search asks first for :func:`least`, which needs no program.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Literal, NamedTuple

from ds_lgamp.cost.activations import ActivationBytes, ChunkBytes
from ds_lgamp.cost.memory import Memory, memory_over_time
from ds_lgamp.cost.offload import HostMemory, OnDisk, disk_use, host_beside_disk
from ds_lgamp.cost.state import held_between_steps
from ds_lgamp.cost.units import ElementBytes, Sharding, UnitSize, aligned
from ds_lgamp.planner.activations import Software, chunk_bytes_of, share
from ds_lgamp.planner.cluster import Cluster
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.model import Model
from ds_lgamp.schedule.actions import Action
from ds_lgamp.schedule.orders import chunks_of
from ds_lgamp.schedule.program import build_rank_program
from ds_lgamp.schedule.spec import RECEIVES_POSTED, STATE_BLOCK, ProgramSpec


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
    # Stock DeepSpeed has whole logits.
    loss_chunk = 0 if configuration.micro_batch_outer else "auto"
    return Software(fused=several, splits_sequence=several, loss_chunk=loss_chunk)


class _Elements(NamedTuple):
    """What parts of a model have on one tensor-parallel rank."""

    layers: list[int]
    """Of a layer of each kind, without experts that ranks divide."""
    first: int
    """Before the layers."""
    last: int
    """Behind them."""
    adapters: int = 0
    """Of a layer."""
    last_adapters: int = 0
    """Behind the layers."""


def _elements(model: Model, ranks: int) -> _Elements:
    """Returns what each of so many tensor-parallel ``ranks`` has. They divide matrices and the biases of their columns;
    they all hold norms and other biases."""
    replicated = 2 * model.norm_parameters + (2 * model.hidden_size if model.biases else 0)
    of_layers = [
        share(kind.layer_parameters - kind.divided_parameters - replicated, ranks) + replicated
        for _, kind in model.kinds
    ]
    words = share(model.vocabulary_size, ranks) * model.hidden_size
    first = words + model.position_embeddings * model.hidden_size
    last = model.norm_parameters + sum(model.extras) + (0 if model.tied_embeddings else words)
    adapters = model.trained_in_layer if model.adapters else 0
    return _Elements(of_layers, first, last, adapters, model.adapters_of(model.matrices_at_end))


LEAST_IN_8_BITS = 4096
"""Tensors with fewer elements have state in 32 bits beside others in 8 (``min_8bit_size`` of bitsandbytes)."""


def _elements_in_blocks(model: Model, in_32_bits: bool = False) -> _Elements:
    """Returns what one rank has where state has 8 bits: tensors that train take whole blocks.

    Args:
        in_32_bits: whether only those tensors count whose state has 32 bits: small ones, and embeddings, as the Trainer
            of transformers asks for.
    """

    def taken(sizes: Iterable[int]) -> int:
        return sum(aligned(size, STATE_BLOCK) for size in sizes if size < LEAST_IN_8_BITS or not in_32_bits)

    if model.adapters:
        # Frozen weights have no state.
        last = [model.adapters * size for matrix in model.matrices_at_end for size in matrix]
        return _elements(model, 1)._replace(adapters=taken(model.tensors_in_layer), last_adapters=taken(last))
    hidden = model.hidden_size
    tables = (rows * hidden for rows in (model.vocabulary_size, model.position_embeddings))
    norms = [hidden] * (model.norm_parameters // hidden)
    last = [*norms, *model.extras, model.head_parameters]
    layers = [taken(kind.tensors_in_layer) for _, kind in model.kinds]
    return _Elements(layers, sum(aligned(size, STATE_BLOCK) for size in tables), taken(last))


def units_of(model: Model, configuration: Configuration, rank: int) -> list[UnitSize]:
    """Returns the units of a pipeline rank, with the elements on one tensor-parallel rank. Experts that ranks divide
    are units of their own."""
    model = model.divided(configuration.expert_ranks)
    if configuration.state != "8bit":
        return _units(model, configuration, rank, _elements(model, configuration.tensor_ranks))
    units = _units(model, configuration, rank, _elements_in_blocks(model))
    exact = _units(model, configuration, rank, _elements_in_blocks(model, in_32_bits=True))
    return [
        unit if unit.frozen else replace(unit, alignment=STATE_BLOCK, in_32_bits=same.trainable)
        for unit, same in zip(units, exact)
    ]


def _units(model: Model, configuration: Configuration, rank: int, elements: _Elements) -> list[UnitSize]:
    """Returns the units of a pipeline rank if the parts of the model have so many ``elements``."""
    last, experts = configuration.chunks - 1, [kind.divided_parameters for _, kind in model.kinds]
    ends = {chunk: 0 for chunk in (0, last)}
    ends[0] += elements.first
    ends[last] += elements.last
    units: list[UnitSize] = []
    users, layers = [], configuration.kinds_of_chunks(model)
    for chunk in chunks_of(configuration.placement, rank):
        parameters = sum(count * of_layer for count, of_layer in zip(layers[chunk], elements.layers))
        if chunk in ends and model.tied_embeddings:
            users.append(chunk)
        elif chunk in ends:
            parameters += ends[chunk]
        if model.adapters:
            adapters = sum(layers[chunk]) * elements.adapters + (elements.last_adapters if chunk == last else 0)
            units.append(UnitSize(aligned(adapters), aligned(adapters), (chunk,)))
            units.append(_frozen(configuration, aligned(parameters), (chunk,)))
        else:
            units.append(UnitSize(aligned(parameters), aligned(parameters), (chunk,)))
        divided = aligned(sum(count * own for count, own in zip(layers[chunk], experts)))
        if divided:
            units.append(UnitSize(divided, divided, (chunk,), expert_ranks=configuration.expert_ranks))
    if users:
        # The engine ties everything that precedes and follows the layers.
        tied, copies = aligned(sum(ends.values())), len({configuration.placement[chunk] for chunk in ends})
        if model.adapters:
            units.append(_frozen(configuration, tied, tuple(users), tied=True))
        else:
            units.append(UnitSize(tied, tied, tuple(users), tied=True, copies=copies))
    return units


def _frozen(configuration: Configuration, parameters: int, chunks: tuple[int, ...], tied: bool = False) -> UnitSize:
    kept: Literal["device", "host"] | None = None if configuration.keep_frozen == "none" else configuration.keep_frozen
    sharers = configuration.home_shared_by
    return UnitSize(parameters, 0, chunks, tied, frozen=True, whole_on=kept, home_shared_by=sharers)


def element_bytes(configuration: Configuration, software: Software) -> ElementBytes:
    """Returns the bytes of an element, also where it travels rounded, or where state is in bf16 or has 8 bits."""
    size = replace(software.element, travel=configuration.travel)
    if configuration.state == "8bit":
        # As the engine, this does not know what bitsandbytes takes for a moment.
        return replace(size, update=None, state_in_8_bits=True)
    return size.with_state_in_half() if configuration.state == "bf16" else size


def sharding_of(configuration: Configuration) -> Sharding:
    """Returns how the data-parallel ranks share their state."""
    return Sharding(configuration.zero_stage, configuration.data_ranks, configuration.hierarchy)


def followed(
    model: Model, configuration: Configuration, rank: int, software: Software, receives_on_arrival: bool = False
) -> Memory:
    """Returns the memory of a pipeline rank by following its program, without token ids and labels."""
    spec = replace(configuration.spec, receives_on_arrival=receives_on_arrival)
    chunks = chunk_bytes_of(model, configuration, software)
    return formula_of(model, configuration, rank, software, chunks)(_program(spec, rank))[0]


def formula_of(
    model: Model, configuration: Configuration, rank: int, software: Software, chunks: Sequence[ChunkBytes]
) -> Callable[[Sequence[Action]], tuple[Memory, list[int]]]:
    """Returns the formula for programs of a pipeline rank: their memory, and the peak during each action."""
    return partial(
        memory_over_time,
        units=units_of(model, configuration, rank),
        sharding=sharding_of(configuration)._replace(all_to_all=software.all_to_all),
        size=element_bytes(configuration, software),
        activation_bytes=ActivationBytes(0, 0, chunks),
        offload=configuration.spec.offload,
    )


@lru_cache(maxsize=1024)
def _program(spec: ProgramSpec, rank: int) -> list[Action]:
    """Returns the program of a rank. Configurations with other numbers of data-parallel or tensor-parallel ranks share
    it."""
    return build_rank_program(spec, rank)


_ID_BYTES = 8
"""Bytes of a token id, and of a label."""


class ConfigurationMemory(NamedTuple):
    """Bytes on the GPU that needs most, by kind, at the moment when it needs most."""

    weights: int
    """Held between steps."""
    master_weights: int
    optimizer_state: int
    gradients: int
    """What the optimizer reads."""
    gathered_weights: int = 0
    """At stage 3, of resident chunks, and parts of them that the host has sent."""
    gradient_buffers: int = 0
    """Full gradients before and during their reductions."""
    stored: int = 0
    """Inputs of chunks or, without recomputation, all that autograd keeps. Also what one chunk of a rank hands to
    another one."""
    messages: int = 0
    """Sends and receives of the pipeline under way."""
    working: int = 0
    """Of the forward, backward or update that runs."""
    batch: int = 0
    """Token ids, labels and tables of rotary positions of all micro-batches."""

    pipeline_rank: int = 0
    """The rank that needs most."""
    host: int = 0
    """Bytes on its host for each GPU, with offloading. No part of the total."""
    disk: int = 0
    """Bytes on the host's disk for each GPU."""

    @property
    def kinds(self) -> dict[str, int]:
        """The bytes on the GPU by name."""
        return {name: size for name, size in self._asdict().items() if name not in ("pipeline_rank", "host", "disk")}

    @property
    def total(self) -> int:
        return sum(self.kinds.values())

    def fits(self, cluster: Cluster) -> bool:
        """Whether a GPU of ``cluster`` and its host have enough."""
        return self.missing(cluster) == 0 and self.host <= cluster.host.memory

    def missing(self, cluster: Cluster) -> float:
        """Returns the bytes that a GPU of ``cluster`` lacks; 0 if it has enough."""
        return max(0.0, self.total - cluster.memory)


def memory(model: Model, configuration: Configuration, software: Software | None = None) -> ConfigurationMemory:
    """Returns what the GPU that needs most memory needs.

    Args:
        software: what trains the model; by default what :mod:`ds_lgamp.planner.write` starts.
    """
    needs = list(of_ranks(model, configuration, software))
    most = max(needs, key=lambda need: need.total)
    return most._replace(host=max(need.host for need in needs), disk=max(need.disk for need in needs))


def fits(model: Model, configuration: Configuration, cluster: Cluster) -> bool:
    """Whether the GPUs of ``cluster`` and their hosts have enough. Looks no further than the first rank that lacks
    something."""
    return least(model, configuration) <= cluster.memory and all(
        need.fits(cluster) for need in of_ranks(model, configuration)
    )


def of_ranks(
    model: Model, configuration: Configuration, software: Software | None = None
) -> Iterator[ConfigurationMemory]:
    """Yields what each of those pipeline ranks needs among which one needs most."""
    software = default_software(configuration) if software is None else software
    return (of_rank(model, configuration, software, rank) for rank in _ranks(model, configuration))


@lru_cache(maxsize=1 << 14)
def least(model: Model, configuration: Configuration) -> int:
    """Returns what a GPU needs at least: what it holds between steps, and the batch."""
    software, of = default_software(configuration), as_executed(model, configuration)
    if of.uses_host:
        return batch_bytes(model, of, software)
    sharding, size = sharding_of(of), element_bytes(of, software)
    held = [held_between_steps(units_of(model, of, rank), sharding, size) for rank in _ranks(model, of)]
    return max(sum(each or 0 for each in kinds) for kinds in held) + batch_bytes(model, of, software)


@lru_cache(maxsize=1 << 14)
def of_rank(model: Model, configuration: Configuration, software: Software, rank: int) -> ConfigurationMemory:
    """Returns what a pipeline rank needs when it needs most.

    A long step is not followed to its end. Whatever follows the fourth group of micro-batches, or under 1F1B the fourth
    round of the pipeline, takes the same memory again. Elsewhere, what is stored grows evenly from
    :data:`MOST_FOLLOWED` forwards on, unless another moment needs most in longer steps. That was so in 1 of 2,000
    configurations, and the result up to 6 % too small.
    """
    of = as_executed(model, configuration)
    ranks, whole = of.pipeline_ranks, of.micro_batches
    grows = of.schedule in ("interleaved_1f1b", "gpipe") or (of.schedule == "layered" and of.group == whole)
    if grows:
        # Under interleaved 1F1B the windows of receives grow too, by as much in every round of all chunks.
        step = of.chunks if of.schedule == "interleaved_1f1b" else 1
        enough = max(MOST_FOLLOWED // of.chunks_per_rank, 2 * ranks + 4)
    else:
        step = of.group if of.schedule == "layered" else ranks
        # Receives are posted several small groups before their use.
        enough = 1 + 3 * (step if ranks == 1 else max(step, RECEIVES_POSTED))
    # What is kept names micro-batches.
    skipped = 0 if of.recompute == "auto" else max(0, (whole - enough) // step)
    found = _by_program(model, replace(of, micro_batches=whole - skipped * step), software, rank)
    if grows and skipped:
        longer = _by_program(model, replace(of, micro_batches=whole - (skipped - 1) * step), software, rank)
        stored = found.stored + skipped * (longer.total - found.total)
        found = found._replace(stored=stored, host=found.host + skipped * (longer.host - found.host))
    return found._replace(batch=batch_bytes(model, of, software))


MOST_FOLLOWED = 1024
"""Forwards of a rank up to which a step is followed whole."""


def _by_program(model: Model, configuration: Configuration, software: Software, rank: int) -> ConfigurationMemory:
    found = followed(model, configuration, rank, software)
    held, host, on_disk = found.at_peak, found.host, 0
    if configuration.on_disk and host is not None:
        host, on_disk = _beside_disk(model, configuration, rank, software, host)

    def together(*kinds: str) -> int:
        return sum(held.get(kind, 0) for kind in kinds)

    return ConfigurationMemory(
        weights=found.weights,
        master_weights=found.master_weights,
        optimizer_state=found.optimizer_state or 0,
        gradients=together("gradients"),
        gathered_weights=together("resident", "loaded"),
        gradient_buffers=together("buffers"),
        stored=together("inputs", "saved", "handed_over", "random_states"),
        messages=together("receives", "sends"),
        working=together("working", "update", "copies"),
        pipeline_rank=rank,
        host=(0 if found.activations is None else found.activations.on_host) + (0 if host is None else host.peak),
        disk=on_disk,
    )


def _beside_disk(
    model: Model, of: Configuration, rank: int, software: Software, host: HostMemory
) -> tuple[HostMemory, int]:
    """Returns what of the ``host`` remains beside a disk that holds what is offloaded, and the bytes there."""
    homes, size, sharding = OnDisk(True, of.offload == "parameters"), element_bytes(of, software), sharding_of(of)
    units = units_of(model, of, rank)
    use = disk_use(_program(of.spec, rank), units, of.spec.offload, homes, sharding, size)
    return host_beside_disk(host, homes, size, use.buffers), use.held


def _ranks(model: Model, configuration: Configuration) -> list[int]:
    """Returns the pipeline ranks among which one needs most. Those between rank 1 and the last one store fewer inputs
    than rank 1, and have no more layers unless speeds share them. Where the first layers of the model have no experts,
    the first rank with most layers that have some is another one. As a vee, with backwards in two parts, and where each
    rank decides what it keeps, it may be any rank."""
    of, ranks = configuration, range(configuration.pipeline_ranks)
    if of.speeds or of.schedule == "zbv" or of.split_backward or of.recompute == "auto":
        return list(ranks)
    found = {0, min(1, ranks[-1]), ranks[-1]}
    if model.dense_layers:
        layers = [0] * len(ranks)
        for chunk, (_, with_experts) in enumerate(configuration.kinds_of_chunks(model)):
            layers[configuration.placement[chunk]] += with_experts
        found.add(layers.index(max(layers)))
    return sorted(found)


def batch_bytes(model: Model, configuration: Configuration, software: Software) -> int:
    """Returns the bytes of all micro-batches before they are embedded. Models of transformers compute a sine and a
    cosine for every position and micro-batch, and, for attention by several operations, masks while a micro-batch is
    under way."""
    per_token, w = 2 * _ID_BYTES * configuration.micro_batch, software.element.weights
    if model.position_embeddings or software.fused:
        return per_token * model.sequence_length * configuration.micro_batches
    per_token += 2 * w * (model.rotary_size or model.head_size)
    masks = w * model.attention_masks * model.sequence_length**2 * configuration.micro_batch
    return per_token * model.sequence_length * configuration.micro_batches + masks * _under_way(configuration)


def _under_way(of: Configuration) -> int:
    """The most micro-batches that a rank has begun and not ended, or a few more."""
    ranks = of.pipeline_ranks
    at_once = {"1f1b": ranks, "interleaved_1f1b": 2 * ranks, "layered": of.group * min(2, ranks)}
    return min(of.micro_batches, at_once.get(of.schedule, of.micro_batches))
