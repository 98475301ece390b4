"""The configurations that a search looks at, the least time that each takes, and what they lack if none fits."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import takewhile
from math import gcd
from typing import Any

from ds_lgamp.cost.activations import ActivationBytes
from ds_lgamp.cost.budget import Decision, Pair, kept_within
from ds_lgamp.planner.activations import Software, chunk_bytes_of
from ds_lgamp.planner.cluster import Cluster, Efficiency
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.hardware import Compute, Seconds
from ds_lgamp.planner.memory import batch_bytes, default_software, formula_of, least, memory, of_ranks
from ds_lgamp.planner.model import MEGATRON, Model
from ds_lgamp.planner.work import host_seconds, is_layered
from ds_lgamp.planner.write import describe, method_of
from ds_lgamp.schedule.actions import Action
from ds_lgamp.schedule.program import build_rank_program

LARGEST_MICRO_BATCH = 64
"""In sequences."""


def candidates(model: Model, cluster: Cluster, sequences: int, state: str = "fp32") -> Iterator[Configuration]:
    """Yields every configuration worth a look that uses the whole cluster and divides the batch evenly, with the
    optimizer's ``state`` in that type."""
    # Blocks of 8 bits lie in whole parameters.
    divides = state != "8bit"
    for tensor_ranks in tensor_rank_numbers(model, cluster) if divides else [1]:
        for pipeline_ranks in divisors(cluster.gpus // tensor_ranks):
            data_ranks = cluster.gpus // tensor_ranks // pipeline_ranks
            if pipeline_ranks > model.layers or sequences % data_ranks:
                continue
            per_rank = sequences // data_ranks
            for micro_batch in divisors(per_rank):
                if micro_batch > LARGEST_MICRO_BATCH:
                    break
                plain = Configuration(
                    data_ranks=data_ranks,
                    pipeline_ranks=pipeline_ranks,
                    tensor_ranks=tensor_ranks,
                    micro_batch=micro_batch,
                    micro_batches=per_rank // micro_batch,
                )
                for expert_ranks in expert_rank_numbers(model, plain) if divides else [1]:
                    for way in _ways(model, replace(plain, expert_ranks=expert_ranks), state):
                        if way.keep_frozen == "host":
                            # Neighbours have the same pipeline rank.
                            sharers = min(data_ranks, max(1, cluster.gpus_per_node // tensor_ranks))
                            way = replace(way, home_shared_by=sharers)
                        for recompute in ("none", "full"):
                            yield replace(way, recompute=recompute, state=state)


def _ways(model: Model, plain: Configuration, state: str) -> Iterator[Configuration]:
    """Yields the methods, chunks and ZeRO stages that suit the layout of ``plain`` and the optimizer's ``state``: stock
    ones first."""
    ranks, partitioned = plain.pipeline_ranks, plain.data_ranks > 1
    # State in bf16 needs a stage, which divides nothing on one data-parallel rank. Stock ZeRO rounds nothing by chance,
    # and its shards cut blocks of 8 bits.
    lowest = 1 if state == "bf16" else 0
    for zero_stage in range(lowest, 2 if partitioned else lowest + 1):
        yield replace(plain, schedule="1f1b", zero_stage=zero_stage)
        for chunks in chunks_per_rank(model, ranks):
            if chunks > 1 and ranks > 1 and plain.micro_batches % ranks == 0:
                yield replace(plain, schedule="interleaved_1f1b", chunks_per_rank=chunks, zero_stage=zero_stage)
    if ranks == 1 and partitioned and plain.expert_ranks == 1 and state == "fp32":
        for zero_stage in (2, 3):
            layers = model.layers
            yield replace(
                plain, micro_batch_outer=True, chunks_per_rank=layers, schedule="layered", zero_stage=zero_stage
            )
    for chunks in chunks_per_rank(model, ranks):
        for zero_stage in range(lowest, 4 if partitioned else lowest + 1):
            layered = replace(plain, schedule="layered", chunks_per_rank=chunks, zero_stage=zero_stage)
            for group in _groups(layered):
                for one in _homes(model, replace(layered, micro_batch_group=group)):
                    yield one
                    if zero_stage == 3 and chunks > layered.resident_chunks:
                        # What stays resident is gathered once, and takes memory.
                        yield replace(one, resident_chunks=chunks)


def _homes(model: Model, layered: Configuration) -> Iterator[Configuration]:
    """Yields a configuration or, where it has frozen weights to keep, one for each home of theirs. One data-parallel
    rank shares them with nobody, but may have them on its host."""
    if not model.adapters:
        yield layered
    elif layered.data_ranks == 1:
        yield layered
        yield replace(layered, zero_stage=3, keep_frozen="host")
    elif layered.zero_stage < 3:
        yield layered
    else:
        yield replace(layered, keep_frozen="none")
        yield replace(layered, keep_frozen="device")
        yield replace(layered, keep_frozen="host")


def _groups(configuration: Configuration) -> list[int | None]:
    """Returns the micro-batch groups worth a look: all, which moves least, and the smallest equal ones that keep every
    pipeline rank busy, which store least."""
    count = configuration.micro_batches
    smaller = [group for group in divisors(count) if configuration.pipeline_ranks <= group < count]
    return [None, *smaller[:1]]


def chunks_per_rank(model: Model, pipeline_ranks: int) -> list[int]:
    """Returns the numbers of chunks that give every rank equally many layers; the most possible if there are none."""
    even, rest = divmod(model.layers, pipeline_ranks)
    return divisors(even) if rest == 0 else [even]


def tensor_rank_numbers(model: Model, cluster: Cluster) -> list[int]:
    """Returns the numbers of tensor-parallel ranks that divide a node's GPUs, the heads and the matrices."""
    return [
        ranks
        for ranks in divisors(cluster.gpus_per_node)
        if not (model.attention_heads % ranks or model.key_value_heads % ranks or model.feed_forward_size % ranks)
        # Of these two kinds of attention, parts are not described. peft knows no layers of Megatron-core.
        and (ranks == 1 or not (model.latent or model.attention_masks or model.adapters))
    ]


def expert_rank_numbers(model: Model, plain: Configuration) -> list[int]:
    """Returns among how many data-parallel ranks of ``plain`` something can divide the experts of a layer."""
    divides = model.divided_by and plain.tensor_ranks == 1
    return divisors(gcd(plain.data_ranks, model.experts)) if divides else [1]


def divisors(number: int) -> list[int]:
    """Returns the divisors of ``number``, ascending."""
    small = [factor for factor in range(1, int(number**0.5) + 1) if number % factor == 0]
    return small + [number // factor for factor in reversed(small) if factor * factor != number]


class Bound:
    """The least seconds that a step can take: compute that is spread evenly, and the bubble."""

    def __init__(self, model: Model, cluster: Cluster) -> None:
        self._model, self._compute = model, Compute(cluster, Efficiency(**cluster.efficiency))
        self._layers: dict[tuple[int, int, bool, int], list[tuple[int, Seconds]]] = {}
        """How many layers of each kind there are and what one of it takes, by what that depends on."""

    def on_host(self, of: Configuration) -> float:
        """Returns the least seconds of loads, of stores, of the host's updates and of its disk, with offloading."""
        if of.offload is None:
            return 0.0
        kinds = self._model.divided(of.expert_ranks).kinds
        experts = sum(count * kind.divided_parameters for count, kind in kinds)
        own = sum(count * kind.trained_in_layer for count, kind in kinds) - experts
        part = of.part(own / of.tensor_ranks / of.pipeline_ranks, experts / of.pipeline_ranks)
        return host_seconds(self._compute, of, part).longest

    def seconds(self, of: Configuration) -> float:
        sizes = of.micro_batch, of.tensor_ranks, of.fused_attention
        key = *sizes, of.expert_ranks
        if key not in self._layers:
            kinds = self._model.divided(of.expert_ranks).kinds
            self._layers[key] = [(count, self._compute.layer(kind, *sizes)) for count, kind in kinds]
        # The only chunk of a single pipeline rank is not recomputed.
        recomputes = of.recompute == "full" and of.chunks > 1
        rank = sum(
            (layer.forward + layer.backward + (layer.forward if recomputes else 0.0)) * count / of.pipeline_ranks
            for count, layer in self._layers[key]
        )
        return rank * (of.micro_batches + (of.pipeline_ranks - 1) / of.chunks_per_rank)

    def kept_share(self, of: Configuration) -> float:
        """Returns what remains of a step's compute if it recomputes nothing."""
        return self.seconds(without_recomputing(of)) / self.seconds(of)


def layout_of(of: Configuration) -> tuple:
    """Returns the method, ranks and micro-batches by which plans count as different."""
    return method_of(of), of.data_ranks, of.pipeline_ranks, of.tensor_ranks, of.micro_batch


def ranks_of(of: Configuration) -> tuple:
    """Returns what plans have in common that differ in their schedule at most, and in what it needs."""
    return of.data_ranks, of.pipeline_ranks, of.tensor_ranks, of.micro_batch, of.travel, of.activation_dtype


MOST_OFFLOADED_COMPUTES = 10_000
"""Forwards and backwards of a step that a search runs on the clock. Offloading has no closed form."""


def node_ranks(of: Configuration, cluster: Cluster) -> int:
    """Returns how many data-parallel ranks form a node; 0 if they cannot share shards of stage 3 there."""
    ranks = cluster.gpus_per_node // of.tensor_ranks
    fits = 1 < ranks < of.data_ranks and of.data_ranks % ranks == 0 and not of.uses_host and of.expert_ranks == 1
    fits &= not of.keeps_frozen_whole
    return ranks if fits and of.zero_stage == 3 and not of.micro_batch_outer else 0


def gathers_again(of: Configuration) -> bool:
    """Whether the layered schedule gathers chunks twice in a step, and a search can run it on the clock."""
    gathers = of.zero_stage == 3 and of.data_ranks > 1 and of.hierarchy is None and of.keep_frozen is None
    quick = is_layered(of) and of.computes <= MOST_OFFLOADED_COMPUTES
    return gathers and quick and of.chunks_per_rank > of.resident_chunks


MOST_DECIDED_COMPUTES = 20_000
"""Forwards and backwards of a step for which a search decides what to keep."""


def may_keep(model: Model, of: Configuration) -> bool:
    """Whether the engine may keep what autograd saves of some micro-batches where ``of`` recomputes all of them, and a
    search can decide of which ones."""
    # Layers of Megatron-LM's loop, which flags with experts start, recompute by themselves.
    alone = of.tensor_ranks == of.expert_ranks == 1 and model.divided_by != MEGATRON
    possible = of.recompute == "full" and not of.micro_batch_outer and not of.split_backward
    return possible and alone and of.computes <= MOST_DECIDED_COMPUTES


def without_recomputing(of: Configuration) -> Configuration:
    """Returns the configuration with everything kept on the device."""
    return replace(of, recompute="none", kept=frozenset(), stores_inputs=False)


def keeping(model: Model, of: Configuration, room: int, software: Software | None = None) -> Configuration:
    """Returns the configuration with recompute "auto": its pipeline ranks keep what they can within ``room`` bytes, as
    the engine decides it. They keep nothing where even recomputing everything takes more."""
    of, software = replace(of, recompute="auto"), software or default_software(of)
    spec, chunks = of.spec, chunk_bytes_of(model, of, software)
    left = room - batch_bytes(model, of, software)

    def of_rank(rank: int) -> frozenset[Pair]:
        formula = formula_of(model, of, rank, software, chunks)

        def build(decision: Decision) -> list[Action]:
            return build_rank_program(replace(spec, **decision._asdict()), rank)

        return kept_within(left, build, lambda actions: formula(actions)[1], ActivationBytes(0, 0, chunks)).kept

    return replace(of, kept=frozenset().union(*map(of_rank, range(of.pipeline_ranks))))


def ways_to_split(model: Model, of: Configuration) -> list[Configuration]:
    """Returns ways to have backwards in two parts, where that may fill a wait: under the schedule of ``of``, and as a
    vee in place of 1F1B. Of each, as many backwards wait as the engine allows by default, then half of them, and so on,
    which take less memory, and sometimes less time.
    """
    # Layers of Megatron-core, which several tensor-parallel ranks share, compute both parts at once, and so do experts.
    # Frozen matrices have no second part.
    may_pay = of.pipeline_ranks > 1 and of.tensor_ranks == 1 and model.experts == 1 and not model.adapters
    if not may_pay or of.micro_batch_outer or of.uses_host or of.recompute == "auto":
        return []
    waiting = [of.pipeline_ranks >> halved for halved in range(of.pipeline_ranks.bit_length())]
    ways = [replace(of, split_backward=most) for most in waiting]
    # A vee has both ends of the model on one rank. If these are tied, backwards of the last chunk stay whole, for which
    # all other ranks wait.
    if of.schedule == "1f1b" and not model.tied_embeddings and model.layers >= 2 * of.pipeline_ranks:
        ways += [replace(way, schedule="zbv", chunks_per_rank=2) for way in ways]
    return ways


def ways_to_round(of: Configuration, gradient_bits: int) -> list[dict[str, Any]]:
    """Returns, for each thing that the ranks send and may round, the changed fields of the configuration."""
    if of.micro_batch_outer:
        return []
    shares = of.data_ranks > 1 and of.hierarchy is None and of.expert_ranks == 1
    changes: list[tuple[bool, dict[str, Any]]] = [
        (shares and of.zero_stage == 3, {"weight_bits": 8}),
        (shares and of.zero_stage > 0, {"gradient_bits": gradient_bits}),
        (of.pipeline_ranks > 1, {"activation_dtype": "fp8"}),
    ]
    return [change for is_possible, change in changes if is_possible]


def ways_to_offload(configuration: Configuration, disk: bool = False) -> list[Configuration]:
    """Returns a layered configuration with its optimizer on the host, and with its parameters there too at stage 3, if
    a search can run it on the clock; with a ``disk``, also with them there. Alone, a data-parallel rank is at stage 3.
    The configuration itself comes first, because its inputs of chunks may lie on the host alone."""
    one = configuration
    if not is_layered(one) or one.hierarchy is not None or one.computes > MOST_OFFLOADED_COMPUTES:
        return []
    disk &= one.state != "8bit"
    stage = one.zero_stage if one.data_ranks > 1 else 3
    ways = [("optimizer", stage > 0), ("parameters", stage == 3 and not one.keeps_frozen_whole)]
    homes = (False, True) if disk else (False,)
    offloads = [(offload, on_disk) for on_disk in homes for offload, is_possible in ways if is_possible]
    return [one, *(replace(one, zero_stage=stage, offload=offload, on_disk=on_disk) for offload, on_disk in offloads)]


def with_room(
    model: Model, ways: Iterable[tuple[Configuration, Configuration]], cluster: Cluster
) -> Iterator[Configuration]:
    """Yields each way to offload if the GPU may hold the rest. Where it cannot hold the rest with inputs of chunks,
    these are on the host too.

    Args:
        ways: configurations without offloading, each with one of its :func:`ways_to_offload`.
    """
    known = set()
    for one, way in ways:
        stays = _stays(model, one, way, cluster)
        if stays is not None and stays.uses_host and stays not in known:
            known.add(stays)
            yield stays


def _stays(model: Model, one: Configuration, way: Configuration, cluster: Cluster) -> Configuration | None:
    """Returns ``way``, with inputs of chunks on the host if a rank has no room for them; None if that is not enough."""
    stores_inputs = False
    for needed in of_ranks(model, one):
        stays = needed.total
        if way.offload is not None:
            stays -= needed.master_weights + needed.optimizer_state + needed.gradients
        if way.offload == "parameters":
            stays -= needed.weights
        stores_inputs |= stays > cluster.memory and one.recompute == "full"
        if stays - needed.stored * stores_inputs > cluster.memory:
            return None
    return replace(way, stores_inputs=stores_inputs)


def ascending(model: Model, configurations: Sequence[Configuration]) -> Iterator[Configuration]:
    """Yields ``configurations`` in the order of their memory. Follows the program of one only where :func:`least` does
    not show that others need less."""
    heap = [(least(model, one), number, False) for number, one in enumerate(configurations)]
    heapify(heap)
    while heap:
        _, number, is_followed = heappop(heap)
        if is_followed:
            yield configurations[number]
        else:
            heappush(heap, (memory(model, configurations[number]).total, number, True))


def lacking(model: Model, cluster: Cluster, sequences: int, tried: Sequence[Configuration], hope: str = "") -> str:
    """Returns a sentence about what is missing after a search for steps of so many ``sequences`` that has found
    nothing: what the configuration of those ``tried`` lacks that needs least. ``hope`` ends it with what may help."""
    if not tried:
        return (
            f"batch_size is {sequences}: no layout of {cluster.gpus} GPUs with at most {model.layers} pipeline ranks "
            "divides it evenly; use a multiple of a divisor of the GPUs"
        )
    by_memory = ascending(model, tried)
    configuration = next(by_memory)
    if memory(model, configuration).missing(cluster) == 0:
        # The GPUs have enough for this one and maybe for others, but the hosts do not.
        others = {configuration, *takewhile(lambda one: memory(model, one).missing(cluster) == 0, by_memory)}
        configuration = min((one for one in tried if one in others), key=lambda one: memory(model, one).host)
    needed = memory(model, configuration)
    kind, most = max(needed.kinds.items(), key=lambda item: item[1])
    if needed.missing(cluster) == 0:
        return (
            f"nothing fits: the smallest configuration ({describe(configuration)}) needs {needed.host / 1e9:.3g} GB on "
            f"the host for each GPU, {(needed.host - cluster.host.memory) / 1e9:.3g} GB more than there are. Use more "
            f"GPUs, hosts with more memory, or a smaller model{hope}"
        )
    return (
        f"nothing fits: the smallest configuration ({describe(configuration)}) needs {needed.total / 1e9:.3g} GB per "
        f"GPU, {needed.missing(cluster) / 1e9:.3g} GB more than there are; most is {kind.replace('_', ' ')} with "
        f"{most / 1e9:.3g} GB. Use more GPUs, or a smaller model, batch or sequence{hope}"
    )
