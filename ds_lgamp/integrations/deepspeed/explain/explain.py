"""``ds_lgamp run --explain``: what the ``ds_lgamp`` block would do to a user's script, without training.

The script runs, unedited and in one process, up to ``deepspeed.initialize``: the other ranks are imagined. What would
have followed is computed by the functions the engine itself uses.
"""

import functools
import inspect
import itertools
import os
from collections.abc import Container, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DtypeEnum
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig, program_spec, read_block
from ds_lgamp.cost.memory import ElementBytes, Memory, UnitSize, rank_memory
from ds_lgamp.cost.storage import aligned
from ds_lgamp.cost.traffic import Traffic, collective_bytes, predict_traffic
from ds_lgamp.integrations.deepspeed.config.optimizer_choice import (
    choose_optimizer,
    kernels_of,
    state_tensors,
    updates_in_place,
)
from ds_lgamp.integrations.deepspeed.config.precision import accumulation_dtype, parameter_dtype
from ds_lgamp.integrations.deepspeed.config.refusals import refuse_irreproducible, refuse_unsupported
from ds_lgamp.integrations.deepspeed.engine.engine import layout_of
from ds_lgamp.integrations.deepspeed.model.deferred_init import build_without_memory
from ds_lgamp.integrations.deepspeed.model.module import Layout, layer_types
from ds_lgamp.integrations.deepspeed.model.random_sources import layer_sources
from ds_lgamp.integrations.deepspeed.model.selective import offers_selective, refuse_unless_offered
from ds_lgamp.integrations.replacing import replace_attribute
from ds_lgamp.runtime.random_state import undisturbed
from ds_lgamp.schedule.actions import Action
from ds_lgamp.schedule.orders import default_placement
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import ProgramSpec, build_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.validate import validate


@dataclass(frozen=True)
class ChunkFacts:
    """A chunk and the layers it is made of."""

    chunk: int
    first_layer: int
    last_layer: int
    layer_types: list[str]
    parameters: int
    """Its own; those of tied modules are counted there."""


@dataclass(frozen=True)
class TiedFacts:
    """A tied module on a pipeline rank."""

    key: str
    layer_type: str
    parameters: int
    chunks: list[int]
    """The rank's chunks that use it."""
    pipeline_ranks: list[int]
    """Those that hold a copy."""


@dataclass(frozen=True)
class RankFacts:
    """What one pipeline rank holds, and does in a step."""

    pipeline_rank: int
    chunks: list[ChunkFacts]
    tied: list[TiedFacts]
    parameters: int
    """Of its chunks and tied modules, before they are partitioned."""
    traffic: Traffic
    tied_sums: int
    """Tied modules whose copies on other pipeline ranks are gathered and added up at the step."""
    collective_bytes_sent: int
    """By gathers, reduces and tied sums, each as in the usual algorithms."""
    memory: Memory


@dataclass(frozen=True)
class Explanation:
    """What a training step would be."""

    pipeline_ranks: int
    data_ranks: int
    schedule: str
    placement: str
    zero_stage: int
    chunks: int
    micro_batches: int
    micro_batch_group: int
    resident_chunks: int
    recompute: str
    precision: str
    optimizer: str
    layers: int
    parameters: int
    """Of the model, tied modules counted once."""
    bubble: float
    """Simulated with backward passes twice as long as forward passes and free communication, as a share of the ideal
    time."""
    bubble_formula: float | None
    """(P-1)/(N*M), where every rank has N chunks and M >= P micro-batches go through them together."""
    micro_batch_outer_gathers: int | None
    """Gathers per step and rank if every micro-batch went through the whole model before the next: 2*N*M. Stage 3."""
    ranks: list[RankFacts]


def imagine_ranks(ranks: int, rank: int) -> None:
    """Makes this process rank ``rank`` of ``ranks``, alone: the environment is as a launcher would set it, the process
    group torch's fake one, where collectives return at once and every rank seems to have sent what this one did."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    for name, value in {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    new_group, signature = dist.new_group, inspect.signature(dist.new_group)

    @functools.wraps(new_group)
    def imagined_group(*arguments: Any, **options: Any) -> Any:
        """A group of the fake backend, whichever is asked for."""
        named = signature.bind(*arguments, **options).arguments
        return new_group(**{**named, "backend": None, "pg_options": None})

    def nothing(*arguments: Any, **options: Any) -> None:
        """What the fake group does not offer; objects a rank would receive stay what they are."""

    replacements: dict[str, Any] = {"new_group": imagined_group}
    replacements |= dict.fromkeys(("init_process_group", "broadcast_object_list", "monitored_barrier"), nothing)
    # Never closed: this process imagines its ranks until it ends.
    undo = ExitStack()
    for name, replacement in replacements.items():
        for module in (dist, dist.distributed_c10d):
            replace_attribute(module, name, replacement, undo)


def explain(
    module: PipelineModule, config: dict[str, Any], config_class: Any, optimizer: Any, partition_method: str
) -> Explanation:
    """What the engine of these arguments would do. Raises ConfigError if there is no block or the engine would."""
    settings = read_block(config)
    if settings is None:
        raise ConfigError(f'there is no enabled {BLOCK} block, stock DeepSpeed would run; add "{BLOCK}": {{}}')
    refuse_unsupported(config_class, module, optimizer)
    refuse_irreproducible(settings, config_class, module)
    layout = layout_of(settings, module, partition_method)
    stage = int(config_class.zero_optimization_stage)
    spec = program_spec(settings, layout.placement, config_class.gradient_accumulation_steps, stage)
    program = build_program(spec)
    validate(spec, program)
    optimizer_facts = _optimizer_facts(optimizer, config_class)
    precision, size = _element_bytes(config_class, optimizer_facts)
    model = _Model(module, layout)
    if settings.recompute == "selective":
        refuse_unless_offered(model.offers_selective)
    data_ranks = module.topology().get_dim("data")
    ranks = [
        _rank_facts(model, rank, actions, spec, data_ranks, size, settings.reproducible)
        for rank, actions in enumerate(program)
    ]
    chunks_per_rank = max(sum(chunk.parameters > 0 for chunk in facts.chunks) for facts in ranks)
    repeats = stage == 3 and data_ranks > 1
    return Explanation(
        pipeline_ranks=spec.pipeline_ranks,
        data_ranks=data_ranks,
        schedule=spec.schedule,
        placement=_placement_name(settings),
        zero_stage=stage,
        chunks=spec.chunks,
        micro_batches=spec.micro_batches,
        micro_batch_group=spec.micro_batch_group,
        resident_chunks=spec.resident_chunks,
        recompute=settings.recompute,
        precision=precision,
        optimizer=optimizer_facts.name,
        layers=module._num_layers,
        parameters=sum(size.parameters for size in model.sizes.values()),
        bubble=simulate(spec, program).bubble,
        bubble_formula=_bubble_formula(spec),
        micro_batch_outer_gathers=2 * chunks_per_rank * spec.micro_batches if repeats else None,
        ranks=ranks,
    )


@dataclass(frozen=True)
class _LayerSize:
    parameters: int
    stored: int
    """Elements they take in a unit's storage."""
    trainable: int
    """Of those, what the optimizer owns."""


class _Model:
    """Sizes and names of a module's layers under a layout."""

    def __init__(self, module: PipelineModule, layout: Layout) -> None:
        self.layout = layout
        self.types = layer_types(module)
        self.keys = [spec.key if isinstance(spec, TiedLayerSpec) else None for spec in module._layer_specs]
        self.sizes: dict[int | str, _LayerSize] = {}
        """By layer, or by key for tied modules."""
        self.offers_selective: list[bool] = []
        """Of each of them, whether it can recompute a part of itself."""
        device = torch.device(get_accelerator().current_device_name())
        sources = layer_sources(device)
        with undisturbed(sources):
            for layer, key in enumerate(self.keys):
                name = layer if key is None else key
                if name not in self.sizes:
                    built = _layer_of(module, layer)
                    self.sizes[name] = _layer_size(built)
                    self.offers_selective.append(offers_selective(built))

    def chunk(self, chunk: int) -> ChunkFacts:
        layers = self.layout.layers(chunk)
        return ChunkFacts(
            chunk, layers[0], layers[-1], [self.types[layer] for layer in layers], self.size(chunk).parameters
        )

    def size(self, chunk: int) -> _LayerSize:
        """Of the chunk's own layers."""
        own = [self.sizes[layer] for layer in self.layout.layers(chunk) if self.keys[layer] is None]
        return _LayerSize(
            sum(size.parameters for size in own), sum(size.stored for size in own), sum(size.trainable for size in own)
        )

    def tied(self, rank: int) -> list[TiedFacts]:
        """The tied modules a pipeline rank holds, by key."""
        facts = []
        for key in sorted({key for key in self.keys if key is not None}):
            users = [layer for layer, name in enumerate(self.keys) if name == key]
            owners = sorted({self.layout.owner(layer) for layer in users})
            if rank in owners:
                chunks = sorted({self.layout.chunk_of(layer) for layer in users if self.layout.owner(layer) == rank})
                facts.append(TiedFacts(key, self.types[users[0]], self.sizes[key].parameters, chunks, owners))
        return facts


def _layer_of(module: PipelineModule, layer: int) -> Any:
    """The layer as built on this rank, or built from its specification without storage."""
    spec = module._layer_specs[layer]
    if isinstance(spec, TiedLayerSpec) and spec.key in module.tied_modules:
        return module.tied_modules[spec.key]
    if str(layer) in module._modules:
        return module._modules[str(layer)]
    if not isinstance(spec, LayerSpec):
        return spec
    return build_without_memory(spec)


def _layer_size(layer: Any) -> _LayerSize:
    parameters = list(layer.parameters()) if isinstance(layer, nn.Module) else []
    return _LayerSize(
        sum(parameter.numel() for parameter in parameters),
        sum(aligned(parameter.numel()) for parameter in parameters),
        sum(aligned(parameter.numel()) for parameter in parameters if parameter.requires_grad),
    )


def _rank_facts(
    model: _Model,
    rank: int,
    actions: Sequence[Action],
    spec: ProgramSpec,
    data_ranks: int,
    size: ElementBytes,
    in_rank_order: bool,
) -> RankFacts:
    chunks = [model.chunk(chunk) for chunk in model.layout.chunks_of(rank)]
    tied = model.tied(rank)
    units = [unit for facts in chunks for unit in _units(model.size(facts.chunk), (facts.chunk,))]
    for module in tied:
        units += _units(model.sizes[module.key], tuple(module.chunks), True, len(module.pipeline_ranks))
    training = [unit for unit in units if not unit.frozen]
    traffic = predict_traffic(
        actions,
        spec.zero_stage,
        [chunk for unit in training if not unit.tied for chunk in unit.chunks],
        [unit.chunks for unit in training if unit.tied],
        [unit.chunks for unit in units if unit.frozen],
    )
    if data_ranks == 1:
        traffic = Traffic(sends=traffic.sends, receives=traffic.receives)
    return RankFacts(
        pipeline_rank=rank,
        chunks=chunks,
        tied=tied,
        parameters=sum(facts.parameters for facts in chunks) + sum(facts.parameters for facts in tied),
        traffic=traffic,
        tied_sums=sum(unit.copies > 1 for unit in units),
        collective_bytes_sent=sum(collective_bytes(actions, unit, spec.zero_stage, data_ranks, size) for unit in units),
        memory=rank_memory(
            actions,
            units,
            spec.zero_stage,
            data_ranks,
            spec.resident_chunks,
            size,
            all_to_all=in_rank_order or get_accelerator().communication_backend_name() == "gloo",
            in_rank_order=in_rank_order,
        ),
    )


def _units(size: _LayerSize, chunks: tuple[int, ...], tied: bool = False, copies: int = 1) -> list[UnitSize]:
    """A chunk's or tied module's unit of what trains and its unit of what is frozen."""
    frozen = size.stored - size.trainable
    units = [UnitSize(size.trainable, size.trainable, chunks, tied, copies)] if size.trainable else []
    return [*units, UnitSize(frozen, 0, chunks, tied, frozen=True)] if frozen else units


def _placement_name(settings: LgampConfig) -> str:
    return settings.placement or default_placement(settings.schedule)


def _bubble_formula(spec: ProgramSpec) -> float | None:
    ranks, micro_batches = spec.pipeline_ranks, spec.micro_batches
    applies = (
        spec.chunks % ranks == 0
        and spec.placement == place_chunks("modular", spec.chunks, ranks)
        and spec.micro_batch_group >= micro_batches >= ranks
    )
    return (ranks - 1) / (spec.chunks // ranks * micro_batches) if applies else None


def _element_bytes(config: Any, optimizer: "_OptimizerFacts") -> tuple[str, ElementBytes]:
    """Name of the precision and bytes per element."""
    weights, gradients = parameter_dtype(config), accumulation_dtype(config)
    travelling = config.communication_data_type or gradients
    size = ElementBytes(
        weights.itemsize, gradients.itemsize, communication=None if travelling == gradients else travelling.itemsize
    )
    state = None if optimizer.state_tensors is None else optimizer.state_tensors * size.master
    return DtypeEnum(weights).name, replace(size, optimizer=state, update=0 if optimizer.in_place else None)


@dataclass(frozen=True)
class _OptimizerFacts:
    name: str
    state_tensors: int | None = None
    """How many tensors of a parameter's shape it keeps; None if unknown."""
    in_place: bool = False
    """Whether its step is known to take nothing for the moment."""


def _optimizer_facts(optimizer: Any, config: Any) -> _OptimizerFacts:
    if isinstance(optimizer, torch.optim.Optimizer):
        kind, options = type(optimizer), optimizer.param_groups
    elif optimizer is not None:
        return _OptimizerFacts("made by a function")
    else:
        device = torch.device(get_accelerator().current_device_name())
        named = config.optimizer_params or {}
        choice = choose_optimizer(config.optimizer_name, named, device, kernels_of(device))
        kind, options = choice.kind, [choice.options]
    counts = [state_tensors(kind, group) for group in options]
    return _OptimizerFacts(
        kind.__name__,
        None if None in counts else max(count for count in counts if count is not None),
        all(updates_in_place(kind, group) for group in options),
    )


def as_text(facts: Explanation) -> str:
    """The explanation for a person to read."""
    parts = (_header, _chunk_table, _traffic_table, _memory_table, _words)
    return "\n\n".join(part(facts) for part in parts)


def _header(facts: Explanation) -> str:
    together = facts.micro_batch_group >= facts.micro_batches
    group = "all together" if together else f"in groups of {facts.micro_batch_group}"
    return (
        f"{facts.pipeline_ranks} pipeline x {facts.data_ranks} data-parallel ranks, schedule {facts.schedule}, "
        f"placement {facts.placement}, ZeRO stage {facts.zero_stage}, {facts.precision}\n"
        f"{facts.micro_batches} micro-batches {group}, {facts.resident_chunks} resident chunks, "
        f"recompute {facts.recompute}, optimizer {facts.optimizer}\n"
        f"{facts.layers} layers in {facts.chunks} chunks, {facts.parameters:,} parameters"
    )


def _chunk_table(facts: Explanation) -> str:
    rows = []
    for rank in facts.ranks:
        for chunk in rank.chunks:
            layers = f"{chunk.first_layer}-{chunk.last_layer}" if len(chunk.layer_types) > 1 else str(chunk.first_layer)
            types = ", ".join(_compressed(chunk.layer_types))
            rows.append([rank.pipeline_rank, f"chunk {chunk.chunk}", layers, types, chunk.parameters])
        for tied in rank.tied:
            users = "chunk " + ", ".join(map(str, tied.chunks))
            rows.append([rank.pipeline_rank, f"tied {tied.key}", users, tied.layer_type, tied.parameters])
        rows.append([rank.pipeline_rank, "all", "", "", rank.parameters])
    return _table(["rank", "part", "layers", "types", "parameters"], rows, left={1, 2, 3})


def _compressed(names: Sequence[str]) -> list[str]:
    runs = [(name, len(list(members))) for name, members in itertools.groupby(names)]
    return [name if count == 1 else f"{name} x {count}" for name, count in runs]


def _traffic_table(facts: Explanation) -> str:
    titles = ["rank", "gathers", "reduces", "tied gathers", "tied reduces", "tied sums", "frozen gathers", "messages"]
    rows = []
    for rank in facts.ranks:
        moved = rank.traffic
        of_chunks, of_tied = [moved.gathers, moved.reduces], [moved.tied_gathers, moved.tied_reduces, rank.tied_sums]
        counts = [*of_chunks, *of_tied, moved.frozen_gathers, moved.sends]
        rows.append([rank.pipeline_rank, *counts, _bytes(rank.collective_bytes_sent)])
    return "Each step, each rank\n" + _table([*titles, "collectives send"], rows)


def _memory_table(facts: Explanation) -> str:
    titles = [
        *("rank", "weights", "resident", "master", "optimizer", "gradients", "gradient buffers", "tied copies", "peak"),
        "stored activations",
    ]
    rows = []
    for rank in facts.ranks:
        held = rank.memory
        before = [held.weights, held.resident_weights, held.master_weights]
        after = [held.gradients, held.gradient_buffers, held.tied_copies, held.peak]
        state = "unknown" if held.optimizer_state is None else _bytes(held.optimizer_state)
        sizes = [*map(_bytes, before), state, *map(_bytes, after)]
        rows.append([rank.pipeline_rank, *sizes, held.stored_activations])
    return "Memory, each rank\n" + _table(titles, rows)


def _words(facts: Explanation) -> str:
    formula = "" if facts.bubble_formula is None else f"; (P-1)/(N*M) is {100 * facts.bubble_formula:.1f}%"
    sentences = [f"Pipeline bubble, simulated: {100 * facts.bubble:.1f}%{formula}."]
    if facts.data_ranks == 1:
        sentences.append("One data-parallel rank: nothing is gathered or reduced.")
    if facts.micro_batch_outer_gathers is not None:
        chunks = max(sum(chunk.parameters > 0 for chunk in rank.chunks) for rank in facts.ranks)
        gathers = max(rank.traffic.gathers for rank in facts.ranks)
        sentences.append(
            "ZeRO-3 with micro-batches outermost would gather about "
            f"2*N*M = 2*{chunks}*{facts.micro_batches} = {facts.micro_batch_outer_gathers} times per step and rank, "
            f"not {gathers}."
        )
    kept = "inputs of chunks" if facts.recompute == "full" else "chunks with what autograd saves of them"
    passing = "layers" if all(rank.memory.update is not None for rank in facts.ranks) else "layers and the optimizer"
    sentences.append(
        f"Stored activations are {kept}, a number: their bytes are unknown before a batch is seen. The peak leaves "
        f"them out, and what {passing} take for the moment."
    )
    if facts.pipeline_ranks > 1:
        sentences.append("Layers of other pipeline ranks are taken as their specifications build them.")
    if any(rank.memory.optimizer_state is None for rank in facts.ranks):
        sentences.append("The optimizer's state is unknown and left out of the peak.")
    return "\n".join(sentences)


def _table(titles: Sequence[str], rows: Sequence[Sequence[object]], left: Container[int] = ()) -> str:
    """Aligned columns, to the right unless their index is in ``left``."""
    cells = [titles, *([f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = (
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths))
        )
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def _bytes(number: float) -> str:
    """In decimal units, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 99.95 else f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
