"""Puts a test model on the ranks of a process group. The data-parallel rank varies fastest, as in DeepSpeed's grid."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_lgamp.partition.agreement import everyone, host_group
from ds_lgamp.partition.bus import Bus
from ds_lgamp.partition.policy import NodeGroups, UnitParameter, ZeroPolicy, node_groups
from ds_lgamp.partition.zero_partition import TiedParameters, ZeroPartition, build_partition
from ds_lgamp.runtime.batch import Calls, Position, Storage
from ds_lgamp.runtime.chunk import Chunk
from ds_lgamp.runtime.edges import pipeline_links
from ds_lgamp.runtime.executor import Executor
from ds_lgamp.runtime.graph import StoredInputs
from ds_lgamp.runtime.links import Links
from ds_lgamp.runtime.recompute import default_sources
from ds_lgamp.schedule.placement import Placement
from ds_lgamp.schedule.spec import Hierarchy, ProgramSpec
from tests.runtime.models import Model, loss_function

DEVICE = torch.device("cpu")


class Grid(NamedTuple):
    """The groups of one (P, W). All configurations that run on it share them."""

    pipeline_ranks: int
    data_ranks: int
    data_group: dist.ProcessGroup
    tie_groups: dict[tuple[int, int], dist.ProcessGroup]
    links: Callable[[Placement], Links]
    nodes: Callable[[Hierarchy], NodeGroups]

    @property
    def pipeline_rank(self) -> int:
        return dist.get_rank() // self.data_ranks

    @property
    def data_rank(self) -> int:
        return dist.get_rank() % self.data_ranks


def build_grid(pipeline_ranks: int, data_ranks: int, dynamic: bool = False) -> Grid:
    pipelines = [[pipe * data_ranks + data for pipe in range(pipeline_ranks)] for data in range(data_ranks)]
    own = divmod(dist.get_rank(), data_ranks)
    alike = [[pipe * data_ranks + data for data in range(data_ranks)] for pipe in range(pipeline_ranks)]
    for pipe in range(pipeline_ranks):
        group = dist.new_group(alike[pipe])
        if pipe == own[0]:
            data_group = group
    tie_groups = {}
    for first in range(pipeline_ranks):
        for second in range(first + 1, pipeline_ranks):
            for pipeline in pipelines:
                group = dist.new_group([pipeline[first], pipeline[second]])
                if dist.get_rank() in (pipeline[first], pipeline[second]):
                    tie_groups[first, second] = group
    hosts = host_group()
    return Grid(
        pipeline_ranks,
        data_ranks,
        data_group,
        tie_groups,
        lambda placement: pipeline_links(pipelines, placement, DEVICE, hosts, dynamic),
        lru_cache(lambda hierarchy: node_groups(hierarchy, alike)),
    )


class Assembled(NamedTuple):
    executor: Executor
    partition: ZeroPartition
    tied_users: list[list[int]]
    """The chunks of this rank that use the tied embedding. Empty if the model is not tied or no chunk here uses it."""
    own_chunks: list[int]
    """The chunks of this rank that have parameters of their own."""


def assemble(
    grid: Grid,
    spec: ProgramSpec,
    model: Model,
    bounds: list[int],
    apply_step: Callable[[], None],
    communication_dtype: torch.dtype | None = None,
    in_rank_order: bool = False,
) -> Assembled:
    """Assembles the model on this rank. ``bounds`` are the chunk bounds over the model's layers."""
    rank = grid.pipeline_rank
    own = [chunk for chunk, owner in enumerate(spec.placement) if owner == rank]
    chunks = {chunk: Chunk(model.layers[bounds[chunk] : bounds[chunk + 1]], bounds[chunk]) for chunk in own}
    parameters, tied = units_of(grid, spec, model, bounds, own)
    partition = build_partition(
        parameters,
        tied,
        ZeroPolicy(
            grid.data_group,
            spec.zero_stage,
            communication_dtype=communication_dtype,
            in_rank_order=in_rank_order,
            nodes=grid.nodes(spec.hierarchy) if spec.hierarchy is not None else None,
        ),
        DEVICE,
    )

    def step() -> None:
        partition.finish_gradients()
        apply_step()
        partition.follow_update()
        partition.drop_gradients()

    executor = Executor(
        Position(spec.placement, rank, tuple(dist.get_process_group_ranks(grid.data_group))),
        chunks,
        Storage(
            partition,
            partition.owns if partition.frees_weights else None,
            StoredInputs(Bus(DEVICE)) if spec.stores_inputs else None,
        ),
        grid.links(spec.placement),
        Calls(loss_function, step),
        default_sources(DEVICE),
    )
    users = [[*each.chunks] for each in tied]
    return Assembled(executor, partition, users, [chunk for chunk in own if parameters[chunk]])


def units_of(
    grid: Grid, spec: ProgramSpec, model: Model, bounds: list[int], own: list[int]
) -> tuple[dict[int, list[UnitParameter]], list[TiedParameters]]:
    """Returns the parameters of each of this rank's ``own`` chunks, and the tied ones that they use."""
    tied_name = "0.weight" if model.tied else None
    parameters: dict[int, list[UnitParameter]] = {chunk: [] for chunk in own}
    for name, parameter in model.parameters().items():
        layer = int(name.split(".")[0])
        for chunk in own:
            if bounds[chunk] <= layer < bounds[chunk + 1] and name != tied_name:
                parameters[chunk].append(UnitParameter(name, parameter, 0))
    users = [chunk for chunk in own if chunk in (0, spec.chunks - 1)] if model.tied else []
    if not users:
        return parameters, []
    ends = (spec.placement[0], spec.placement[-1])
    group = None if ends[0] == ends[1] else grid.tie_groups[min(ends), max(ends)]
    embedding = [UnitParameter("0.weight", model.parameters()["0.weight"], 0)]
    return parameters, [TiedParameters("embedding", embedding, users, group)]


def gathered(partition: ZeroPartition, shards: Callable) -> dict[str, torch.Tensor]:
    """Gathers full tensors by parameter name from a shard of every unit."""
    tensors = {}
    for unit in partition.units:
        full = shards(unit)
        if full is None:
            # A frozen unit has no gradient.
            continue
        if unit.storage.partitioned:
            parts = dict(everyone((unit.policy.shard_index, full), unit.policy.data_group))
            full = torch.cat([parts[index] for index in sorted(parts)])
        for (name, shape, _), start in zip(unit.storage.contents(), unit.storage.offsets):
            tensors[name] = full[start : start + math.prod(shape)].view(shape).clone()
    return tensors
