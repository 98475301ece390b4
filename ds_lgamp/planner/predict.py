"""How long a step takes: the parts of :mod:`ds_lgamp.planner.work`, put together by a schedule. And what network that
needs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil
from typing import Any

from ds_lgamp.planner.cluster import Cluster, Efficiency
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.hardware import ELEMENT, Compute, Network, Seconds, group_of, network_of
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.work import (
    collectives_of,
    costs_of,
    crosses_nodes,
    exact_seconds,
    hop_of,
    is_layered,
    reduction,
    tied_seconds,
    work_of,
)
from ds_lgamp.schedule.closed_form import Shape, step_time
from ds_lgamp.schedule.costs import Durations, Link
from ds_lgamp.schedule.program import build_timed_program
from ds_lgamp.schedule.simulate import simulate

MODULES = 6
"""Modules of a layer with parameters of their own: two norms, two matrices of the attention, two of the feed-forward
part. Stock ZeRO-3 gathers each by itself."""


@dataclass(frozen=True)
class Prediction:
    """Seconds of one step and what they are spent on. The parts add up."""

    compute: float
    """Kernels of the slowest pipeline rank, recomputation included."""
    tensor_parallel: float
    """Collectives of the tensor-parallel group. Compute waits for them."""
    bubble: float
    """Pipeline ranks wait for the first and for the last micro-batch."""
    messages: float
    """Messages between pipeline ranks that no compute hides."""
    data_parallel: float
    """Reductions of gradients that no compute hides."""
    gathers: float
    """Gathers of parameters that no compute hides."""
    bus: float
    """Transfers between host and GPU that no compute hides."""
    optimizer: float
    """With offloading, what no compute hides of it."""
    mfu: float
    """Model FLOPs utilisation: FLOP/s that the model needs without recomputation, over the peak."""

    @property
    def parts(self) -> dict[str, float]:
        """The seconds by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "mfu"}

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def scaled(prediction: Prediction, seconds: float) -> Prediction:
    """Returns a prediction of so many ``seconds``, with the same shares of its parts."""
    ratio = seconds / prediction.seconds
    parts = {name: ratio * part for name, part in prediction.parts.items()}
    return Prediction(**parts, mfu=prediction.mfu / ratio)


@dataclass(frozen=True)
class _Stage:
    """What one pipeline rank does for one micro-batch."""

    compute: Seconds
    """The backward includes recomputation."""
    recompute: float
    """The part of it that recomputation takes."""
    tensor_parallel: float
    parameters: float
    """On one tensor rank."""

    @property
    def seconds(self) -> float:
        return self.compute.forward + self.compute.backward + self.tensor_parallel


def predict(model: Model, cluster: Cluster, configuration: Configuration, on_clock: bool = False) -> Prediction:
    """Predicts a step of ``model`` on ``cluster``.

    With ``on_clock``, or with hierarchical shards or offloading, a layered step is run action by action, and takes
    :func:`ds_lgamp.planner.work.exact_seconds`. Otherwise a formula assumes equal chunks and ranks.

    Raises ValueError if the configuration needs more GPUs than there are, or if tensor ranks or layers do not divide.
    """
    _check(model, cluster, configuration)
    efficiency = Efficiency(**cluster.efficiency)
    network = network_of(cluster, configuration.gpus, efficiency)
    compute = Compute(cluster, efficiency)
    stages = _stages(model, cluster, configuration, compute, network)
    slowest = max(stages, key=lambda stage: stage.seconds)
    micro_batches = configuration.micro_batches
    parameters = max(stage.parameters for stage in stages)
    on_clock = is_layered(configuration) and (on_clock or configuration.takes_clock)
    waits = _clocked_waits if on_clock else _layered_waits if is_layered(configuration) else _stock_waits
    update = compute.update(parameters / configuration.shards)
    parts = {
        "compute": micro_batches * (slowest.compute.forward + slowest.compute.backward),
        "tensor_parallel": micro_batches * slowest.tensor_parallel,
        "bus": 0.0,
        "optimizer": update,
        **waits(model, cluster, configuration, network, stages),
    }
    if configuration.overlap_update and not on_clock:
        # The first update has nothing to hide behind. The others run while a rank waits for gathers.
        chunks = configuration.chunks_per_rank
        parts["optimizer"] -= min(update * (chunks - 1) / chunks, parts["gathers"])
    if parts["bubble"] < 0:
        # A last chunk that turns at once is not recomputed. On one pipeline rank this shortens the step.
        sums = slowest.tensor_parallel / 3
        of_sums = sums / (slowest.recompute + sums) if sums else 0.0
        parts["compute"] += parts["bubble"] * (1 - of_sums)
        parts["tensor_parallel"] += parts["bubble"] * of_sums
        parts["bubble"] = 0.0
    if not on_clock:
        parts["data_parallel"] += tied_seconds(model, cluster, configuration, network)
    useful = 3 * model.forward_flops(configuration.sequences * model.sequence_length)
    return Prediction(**parts, mfu=useful / (sum(parts.values()) * configuration.gpus * cluster.peak))


def _check(model: Model, cluster: Cluster, configuration: Configuration) -> None:
    if configuration.gpus > cluster.gpus:
        raise ValueError(f"the configuration needs {configuration.gpus} GPUs; {cluster.name} has {cluster.gpus}")
    tensor_ranks = configuration.tensor_ranks
    if model.attention_heads % tensor_ranks:
        raise ValueError(f"tensor_ranks is {tensor_ranks}; it must divide the {model.attention_heads} attention_heads")


def _stages(
    model: Model, cluster: Cluster, configuration: Configuration, compute: Compute, network: Network
) -> list[_Stage]:
    """What each pipeline rank does. Only the ends and the numbers of layers differ."""
    work = work_of(model, cluster, configuration, compute, network)
    layer = work.layer
    recomputed = layer.forward if configuration.recompute == "full" else 0.0
    # Two sums in a forward (arXiv 1909.08053), two in a backward, two in a recomputation.
    sums = work.tensor_sum * (6 if configuration.recompute == "full" else 4)
    layers = [0] * configuration.pipeline_ranks
    for chunk, count in enumerate(configuration.layers_of_chunks(model)):
        layers[configuration.placement[chunk]] += count
    stages = [
        _Stage(
            Seconds(count * layer.forward, count * (layer.backward + recomputed)),
            count * recomputed,
            count * sums,
            count * work.layer_parameters,
        )
        for count in layers
    ]
    for chunk, end, parameters in work.ends:
        rank = configuration.placement[chunk]
        stages[rank] = _with_end(stages[rank], end, work.tensor_sum, parameters)
    return stages


def _with_end(stage: _Stage, end: Seconds, tensor_parallel: float, parameters: float) -> _Stage:
    return _Stage(
        Seconds(stage.compute.forward + end.forward, stage.compute.backward + end.backward),
        stage.recompute,
        stage.tensor_parallel + tensor_parallel,
        stage.parameters + parameters,
    )


def _layered_waits(
    model: Model, cluster: Cluster, configuration: Configuration, network: Network, stages: Sequence[_Stage]
) -> dict[str, float]:
    """Returns the seconds of the waits of a layered step, by the clock's closed form: each wait is the time of the step
    with its cause less that without it.

    The closed form knows equal ranks only, so the slowest rank stands for all of them; :func:`_lighter` corrects this.
    It gives collectives a network card of their own. Messages that cross nodes share it, so a collective here also
    takes the time of the messages of a visit, or at most twice its own.
    """
    slowest, chunks = max(stages, key=lambda stage: stage.seconds), configuration.chunks_per_rank
    shape = Shape(
        configuration.schedule,
        configuration.pipeline_ranks,
        chunks,
        configuration.micro_batches,
        configuration.zero_stage,
        configuration.resident_chunks,
        micro_batch_group=configuration.micro_batch_group,
    )
    # A forward has two of the six sums of tensor-parallel ranks, or of the four without recomputation.
    full = configuration.recompute == "full"
    sums = slowest.tensor_parallel / (3 if full else 2)
    forward = (slowest.compute.forward + sums) / chunks
    recompute = (slowest.recompute + sums) / chunks if full else 0.0
    computes = Durations(forward, slowest.seconds / chunks - forward - recompute, recompute=recompute)
    hop, message = hop_of(model, cluster, configuration, network)
    size = ELEMENT * max(stage.parameters for stage in stages) / chunks
    moves = collectives_of(cluster, configuration, network, size)
    beside = configuration.micro_batches * message if crosses_nodes(cluster, configuration) else 0.0
    alone = moves.gather, moves.reduce
    gathers, reductions = (min(2 * each, each + beside) for each in alone)
    with_messages = computes._replace(hop=hop, message=message)
    with_gathers = with_messages._replace(gather=gathers)
    longer_and_longer = [computes, with_messages, with_gathers, with_gathers._replace(reduce=reductions)]
    steps = [step_time(shape, durations) for durations in longer_and_longer]
    bubble = steps[0] - configuration.micro_batches * slowest.seconds - _lighter(configuration, stages)
    # No messages travel beside the first gather and the last reduction.
    slower = 0.0, gathers - alone[0], reductions - alone[1]
    waits = [max(0.0, longer - shorter - late) for shorter, longer, late in zip(steps, steps[1:], slower)]
    return dict(zip(("bubble", "messages", "gathers", "data_parallel"), [bubble, *waits]))


_CAUSES = {
    "messages": ("hop", "message"),
    "gathers": ("gather", "refresh"),
    "data_parallel": ("reduce", "combine", "tied"),
    "bus": ("load", "store", "input"),
    "optimizer": ("update",),
}
"""What causes each wait, by the names of :class:`Costs`."""


def _clocked_waits(
    model: Model, cluster: Cluster, configuration: Configuration, _: Network, stages: Sequence[_Stage]
) -> dict[str, float]:
    """Returns the same waits as :func:`_layered_waits`, with chunks, ranks and links as they are."""
    spec, costs = configuration.spec, costs_of(model, cluster, configuration)
    program = build_timed_program(spec)

    steps = [simulate(spec, program, costs, sends_at_once=True).step_time]
    for names in reversed(_CAUSES.values()):
        present = {name: getattr(costs, name) for name in names if any(_times(getattr(costs, name)))}
        absent: dict[str, Any] = {name: _nothing(each) for name, each in present.items()}
        costs = replace(costs, **absent)
        steps.insert(0, simulate(spec, program, costs, sends_at_once=True).step_time if present else steps[0])
    # A cause may make a step shorter, by the order of what shares a network. The parts still add up to the last step.
    for shorter in reversed(range(len(_CAUSES))):
        steps[shorter] = min(steps[shorter], steps[shorter + 1])
    slowest = max(stage.seconds for stage in stages)
    waits = {cause: longer - shorter for cause, longer, shorter in zip(_CAUSES, steps[1:], steps)}
    return {"bubble": steps[0] - configuration.micro_batches * slowest, **waits}


def _times(costs: Mapping[Link, float] | Sequence[float]) -> Collection[float]:
    return costs.values() if isinstance(costs, Mapping) else costs


def _nothing(costs: Mapping[Link, float] | Sequence[float]) -> Mapping[Link, float] | Sequence[float]:
    return dict.fromkeys(costs, 0.0) if isinstance(costs, Mapping) else [0.0] * len(costs)


def _lighter(configuration: Configuration, stages: Sequence[_Stage]) -> float:
    """Returns by how many seconds the first micro-batch passes the ranks earlier because not all are as slow as the
    slowest."""
    seconds = [stage.seconds for stage in stages]
    return (len(seconds) * max(seconds) - sum(seconds)) / configuration.chunks_per_rank


def _stock_waits(
    model: Model, cluster: Cluster, configuration: Configuration, network: Network, stages: Sequence[_Stage]
) -> dict[str, float]:
    """Returns the seconds of the waits of stock schedules, as Megatron-LM and DeepSpeed run them.

    Where forwards and backwards alternate, a rank waits for its neighbour's answer in every slot: in 1F1B, and in the
    rounds of P micro-batches of interleaved 1F1B. GPipe waits for the first and the last micro-batch, and for messages
    that take longer than the compute beside them.
    """
    slowest = max(stages, key=lambda stage: stage.seconds)
    ranks, chunks, micro_batches = len(stages), configuration.chunks_per_rank, configuration.micro_batches
    hop, _ = hop_of(model, cluster, configuration, network)
    if configuration.schedule in ("1f1b", "interleaved_1f1b"):
        messages = 2 * (ranks - 1 + chunks * micro_batches) * hop if ranks > 1 else 0.0
    else:
        late = sum(max(0.0, hop - seconds) for seconds in (slowest.compute.forward, slowest.compute.backward))
        messages = 2 * (ranks - 1) * hop + micro_batches * late
    parameters = max(stage.parameters for stage in stages)
    gathers, reductions = _exposed(model, cluster, configuration, network, slowest.compute, parameters)
    bubble = _bubble(configuration, [stage.seconds for stage in stages])
    return {"bubble": bubble, "messages": messages, "gathers": gathers, "data_parallel": reductions}


def _bubble(configuration: Configuration, stages: Sequence[float]) -> float:
    """Seconds that the slowest pipeline rank waits. ``stages`` gives those of one micro-batch on each rank.

    The first micro-batch passes a chunk of every other rank before the slowest rank has work without a pause, or does
    so on the way back (arXiv 2104.04473, section 2.2, for ranks that differ).
    """
    return (sum(stages) - max(stages)) / configuration.chunks_per_rank


def _exposed(
    model: Model,
    cluster: Cluster,
    configuration: Configuration,
    network: Network,
    compute: Seconds,
    parameters: float,
) -> tuple[float, float]:
    """Seconds of gathers and of reductions of ``parameters`` that a rank of a stock schedule cannot hide behind the
    ``compute`` of each micro-batch."""
    group = group_of(cluster, configuration.gpus, configuration.data_ranks, configuration.tensor_ranks)
    if group.size == 1:
        return 0.0, 0.0
    pieces = MODULES * ceil(model.layers / configuration.pipeline_ranks) if configuration.zero_stage == 3 else 1
    size = ELEMENT * parameters / pieces
    gather = pieces * network.all_gather(group, size)
    beside = Seconds(*(configuration.micro_batches * each for each in (compute.forward, compute.backward)))
    return _exposed_by_micro_batches(
        configuration, beside, gather, pieces * reduction(configuration, network, group, size)
    )


def _exposed_by_micro_batches(
    configuration: Configuration, beside: Seconds, gather: float, reduction: float
) -> tuple[float, float]:
    """With micro-batches outermost, each of them gathers twice (stage 3) and reduces (stages 2 and 3). Then gathers run
    before the compute and reductions after it; otherwise only the backward of the last micro-batch can hide a
    reduction. Stages 1 and 2 gather after the update, when nothing computes."""
    rounds = configuration.micro_batches if configuration.micro_batch_outer else 1
    gathers = 2 * rounds * gather if configuration.zero_stage == 3 else 0.0
    reductions = reduction * (rounds if configuration.zero_stage >= 2 else 1)
    after_update = gather if configuration.zero_stage in (1, 2) else 0.0
    if not configuration.overlaps:
        return after_update + gathers, reductions
    share = rounds / configuration.micro_batches
    exposed = max(0.0, gathers / 2 - share * beside.forward)
    return after_update + exposed, max(0.0, gathers / 2 + reductions - share * beside.backward)


SLOWEST, FASTEST = 1e5, 1e13
"""Bytes per second of a network card between which the needed bandwidth is looked for."""
MOST_CLOCKED_COMPUTES = 50_000
"""The most forwards and backwards to run on the clock, half a second for each bandwidth."""


def with_bandwidth(cluster: Cluster, bandwidth: float) -> Cluster:
    """Returns the cluster with ``bandwidth``, in bytes per second, for each network card between nodes."""
    return replace(cluster, between=replace(cluster.between, bandwidth=bandwidth))


def seconds_over_bandwidth(
    model: Model, cluster: Cluster, configuration: Configuration, bandwidths: Sequence[float]
) -> list[float]:
    """Returns the seconds of a step for each bandwidth of the network cards between nodes, in bytes per second: of a
    layered step by the clock, as plans have them, or by the formula if it is long."""
    on_clock = is_layered(configuration) and configuration.computes <= MOST_CLOCKED_COMPUTES

    def seconds(bandwidth: float) -> float:
        changed = with_bandwidth(cluster, bandwidth)
        if on_clock:
            return exact_seconds(model, changed, configuration)
        return predict(model, changed, configuration).seconds

    return [seconds(bandwidth) for bandwidth in bandwidths]


def bandwidth_needed(model: Model, cluster: Cluster, configuration: Configuration, loss: float = 0.05) -> float | None:
    """Returns the bandwidth of a network card between nodes, in bytes per second, at which a step takes ``loss`` longer
    than with an unlimited one. None if it takes less than that even at 100 kB/s, as within one node."""
    (ideal,) = seconds_over_bandwidth(model, cluster, configuration, [FASTEST])
    slow, fast = SLOWEST, FASTEST

    def loses(bandwidth: float) -> bool:
        return seconds_over_bandwidth(model, cluster, configuration, [bandwidth])[0] > ideal * (1 + loss)

    if not loses(slow):
        return None
    while fast / slow > 1.01:
        middle = (slow * fast) ** 0.5
        slow, fast = (middle, fast) if loses(middle) else (slow, middle)
    return fast
