"""How long a step takes: the parts of :mod:`ds_lgamp.planner.work`, put together by a schedule. And what network that
needs."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import ceil
from operator import add

from ds_lgamp.planner.cluster import Cluster
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.hardware import Seconds, step_flops
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.work import Work, exact_seconds, is_layered, is_own, total
from ds_lgamp.schedule.closed_form import Shape, step_time
from ds_lgamp.schedule.costs import Durations
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
    expert_parallel: float
    """All-to-alls of tokens among ranks that divide experts. Compute waits for them."""
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


PARTS = {
    "compute": "computing",
    "tensor_parallel": "tensor-parallel collectives",
    "expert_parallel": "all-to-alls of tokens",
    "bubble": "the bubble",
    "messages": "messages between pipeline ranks",
    "data_parallel": "reductions of gradients",
    "gathers": "gathers of parameters",
    "bus": "transfers between host and GPU",
    "optimizer": "the optimizer",
}
"""What the parts of a prediction are called in a sentence."""


def limit(prediction: Prediction) -> str:
    """Returns a sentence about what limits a step."""
    parts = dict(prediction.parts)
    compute = parts.pop("compute")
    name = max(parts, key=lambda part: parts[part])
    seconds = prediction.seconds
    return (
        f"A step computes for {compute / seconds:.0%} of its time, at an MFU of {prediction.mfu:.0%}; what costs most "
        f"beside it is {PARTS[name]} with {parts[name] / seconds:.1%}."
    )


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
    exchanges: float
    """All-to-alls of tokens among ranks that divide experts."""
    parameters: float
    """On one tensor rank, without experts that ranks divide."""
    experts: float
    frozen: float

    @property
    def seconds(self) -> float:
        return self.compute.forward + self.compute.backward + self.tensor_parallel + self.exchanges


def predict(model: Model, cluster: Cluster, configuration: Configuration, on_clock: bool = False) -> Prediction:
    """Predicts a step of ``model`` on ``cluster``.

    With ``on_clock``, or where the closed form does not know the step (``Configuration.takes_clock``), a step of
    ds_lgamp is run action by action, and takes :func:`ds_lgamp.planner.work.exact_seconds`. Otherwise a formula assumes
    equal chunks and ranks.

    Raises ValueError if the configuration needs more GPUs than there are, if tensor ranks or layers do not divide, or
    if the model gains nothing by a vee or by backwards in two parts.
    """
    _check(model, cluster, configuration)
    work = Work(model, cluster, configuration)
    stages = _stages(work)
    slowest = max(stages, key=lambda stage: stage.seconds)
    micro_batches = configuration.micro_batches
    on_clock = is_own(configuration) and (on_clock or configuration.takes_clock)
    waits = _clocked_waits if on_clock else _layered_waits if is_layered(configuration) else _stock_waits
    own = max(configuration.part(stage.parameters, stage.experts) for stage in stages)
    update = work.compute.update(own, configuration.state)
    parts = {
        "compute": micro_batches * (slowest.compute.forward + slowest.compute.backward),
        "tensor_parallel": micro_batches * slowest.tensor_parallel,
        "expert_parallel": micro_batches * slowest.exchanges,
        "bus": 0.0,
        "optimizer": update,
        **waits(work, stages),
    }
    if configuration.overlap_update and not on_clock:
        # Nothing hides the first update. The others run while a rank waits for gathers.
        chunks = configuration.chunks_per_rank
        parts["optimizer"] -= min(update * (chunks - 1) / chunks, parts["gathers"])
    if parts["bubble"] < 0:
        # A last chunk that turns at once is not recomputed. On one pipeline rank this shortens the step.
        waits_for = slowest.tensor_parallel + slowest.exchanges
        of_waits = waits_for / 3 / (slowest.recompute + waits_for / 3) if waits_for else 0.0
        parts["compute"] += parts["bubble"] * (1 - of_waits)
        for name, own in (("tensor_parallel", slowest.tensor_parallel), ("expert_parallel", slowest.exchanges)):
            parts[name] += parts["bubble"] * of_waits * (own / waits_for) if own else 0.0
        parts["bubble"] = 0.0
    if not on_clock:
        parts["data_parallel"] += work.tied_sum
    useful = step_flops(model, configuration.sequences * model.sequence_length)
    return Prediction(**parts, mfu=useful / (sum(parts.values()) * configuration.gpus * cluster.peak))


def _check(model: Model, cluster: Cluster, configuration: Configuration) -> None:
    if configuration.gpus > cluster.gpus:
        raise ValueError(f"the configuration needs {configuration.gpus} GPUs; {cluster.name} has {cluster.gpus}")
    tensor_ranks = configuration.tensor_ranks
    if model.attention_heads % tensor_ranks:
        raise ValueError(f"tensor_ranks is {tensor_ranks}; it must divide the {model.attention_heads} attention_heads")
    if configuration.schedule == "zbv" and model.tied_embeddings:
        raise ValueError(
            f"schedule is 'zbv', which has both ends of the model on one pipeline rank, but those of {model.name} are "
            "tied; use another schedule"
        )
    if configuration.split_backward and model.adapters:
        raise ValueError(
            f"split_backward is {configuration.split_backward}, but the matrices of {model.name} are frozen, so that "
            "backwards have no second part; use 0"
        )
    if configuration.split_backward and model.experts > 1:
        raise ValueError(
            f"split_backward is {configuration.split_backward}, but the experts of {model.name} compute both parts of "
            "a backward at once; use 0"
        )


def _stages(work: Work) -> list[_Stage]:
    """What each pipeline rank does. Only the ends and the layers differ."""
    of, layers = work.configuration, work.layers
    forwards = [layer.seconds.forward for layer in layers]
    # Two sums in a forward (arXiv 1909.08053), two in a backward, two in a recomputation.
    rounds = 3 if of.recompute == "full" else 2
    sums = work.tensor_sum * (2 * rounds)
    counts = [(0,) * len(layers)] * of.pipeline_ranks
    for chunk, own in enumerate(of.kinds_of_chunks(work.model)):
        rank = of.placement[chunk]
        counts[rank] = tuple(map(add, counts[rank], own))
    stages = [
        _Stage(
            Seconds(total(own, forwards), total(own, [layer.seconds.backward for layer in layers]) + repeated),
            repeated,
            sum(own) * sums,
            total(own, [rounds * layer.exchange for layer in layers]),
            total(own, [layer.parameters for layer in layers]),
            total(own, [layer.experts for layer in layers]),
            total(own, [layer.frozen for layer in layers]) if work.model.adapters else 0.0,
        )
        for own, repeated in zip(counts, _recomputed(work, counts, forwards))
    ]
    for chunk, end, parameters, frozen in work.ends:
        rank = of.placement[chunk]
        stage, compute = stages[rank], stages[rank].compute
        stages[rank] = replace(
            stage,
            compute=Seconds(compute.forward + end.forward, compute.backward + end.backward),
            tensor_parallel=stage.tensor_parallel + work.tensor_sum,
            parameters=stage.parameters + parameters,
            frozen=stage.frozen + frozen,
        )
    return stages


def _recomputed(work: Work, counts: Sequence[Sequence[int]], forwards: Sequence[float]) -> list[float]:
    """Returns for how many seconds of each micro-batch the pipeline ranks, with their ``counts`` of layers, compute
    forwards again. With "full" the last chunk counts too, although it may turn at once."""
    of = work.configuration
    if of.recompute != "auto":
        return [total(own, forwards) if of.recompute == "full" else 0.0 for own in counts]
    seconds = [0.0] * of.pipeline_ranks
    for chunk, own in enumerate(of.kinds_of_chunks(work.model)):
        seconds[of.placement[chunk]] += of.recomputed_share(chunk) * total(own, forwards)
    return seconds


def _layered_waits(work: Work, stages: Sequence[_Stage]) -> dict[str, float]:
    """Returns the seconds of the waits of a layered step, by the clock's closed form: each wait is the time of the step
    with its cause less that without it.

    The closed form knows equal ranks only, so the slowest rank stands for all of them; :func:`_lighter` corrects this.
    It gives collectives a network card of their own. Messages that cross nodes share it, so a collective here also
    takes the time of the messages of a visit, or at most twice its own.
    """
    configuration = work.configuration
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
    # A forward has two of the six sums of tensor-parallel ranks, or of the four without recomputation. It has as many
    # of the all-to-alls.
    full = configuration.recompute == "full"
    sums = (slowest.tensor_parallel + slowest.exchanges) / (3 if full else 2)
    forward = (slowest.compute.forward + sums) / chunks
    recompute = (slowest.recompute + sums) / chunks if full else 0.0
    computes = Durations(forward, slowest.seconds / chunks - forward - recompute, recompute=recompute)
    hop, message = work.message
    moves = work.collectives(*(most / chunks for most in _most_held(stages)))
    beside = configuration.micro_batches * message if work.messages_cross_nodes else 0.0
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


def _most_held(stages: Sequence[_Stage]) -> tuple[float, float, float]:
    """Returns the most parameters of a rank: those that train, experts that ranks divide, and frozen ones."""
    parameters, experts = max(stage.parameters for stage in stages), max(stage.experts for stage in stages)
    return parameters, experts, max([stage.frozen for stage in stages])


_CAUSES = {
    "messages": ("hop", "message"),
    "gathers": ("gather", "refresh"),
    "data_parallel": ("reduce", "combine", "tied"),
    "bus": ("load", "store", "input", "weights", "disk"),
    "optimizer": ("update",),
}
"""What causes each wait, by the names of :class:`Costs`."""


def _clocked_waits(work: Work, stages: Sequence[_Stage]) -> dict[str, float]:
    """Returns the same waits as :func:`_layered_waits`, with chunks, ranks and links as they are."""
    spec, costs = work.configuration.spec, work.costs()
    program = build_timed_program(spec)
    steps = [simulate(spec, program, costs, sends_at_once=True).step_time]
    for names in reversed(_CAUSES.values()):
        fewer = costs.without(*names)
        steps.insert(0, steps[0] if fewer is costs else simulate(spec, program, fewer, sends_at_once=True).step_time)
        costs = fewer
    # A cause may make a step shorter, by the order of what shares a network. The parts still add up to the last step.
    for shorter in reversed(range(len(_CAUSES))):
        steps[shorter] = min(steps[shorter], steps[shorter + 1])
    slowest = max(stage.seconds for stage in stages)
    waits = {cause: longer - shorter for cause, longer, shorter in zip(_CAUSES, steps[1:], steps)}
    return {"bubble": steps[0] - work.configuration.micro_batches * slowest, **waits}


def _lighter(configuration: Configuration, stages: Sequence[_Stage]) -> float:
    """Returns by how many seconds the first micro-batch passes the ranks earlier because not all are as slow as the
    slowest."""
    seconds = [stage.seconds for stage in stages]
    return (len(seconds) * max(seconds) - sum(seconds)) / configuration.chunks_per_rank


def _stock_waits(work: Work, stages: Sequence[_Stage]) -> dict[str, float]:
    """Returns the seconds of the waits of stock schedules, as Megatron-LM and DeepSpeed run them.

    Where forwards and backwards alternate, a rank waits for its neighbour's answer in every slot: in 1F1B, and in the
    rounds of P micro-batches of interleaved 1F1B. GPipe waits for the first and the last micro-batch, and for messages
    that take longer than the compute beside them.
    """
    slowest, configuration = max(stages, key=lambda stage: stage.seconds), work.configuration
    ranks, chunks, micro_batches = len(stages), configuration.chunks_per_rank, configuration.micro_batches
    hop, _ = work.message
    if configuration.schedule in ("1f1b", "interleaved_1f1b"):
        messages = 2 * (ranks - 1 + chunks * micro_batches) * hop if ranks > 1 else 0.0
    else:
        late = sum(max(0.0, hop - seconds) for seconds in (slowest.compute.forward, slowest.compute.backward))
        messages = 2 * (ranks - 1) * hop + micro_batches * late
    gathers, reductions = _exposed(work, slowest.compute, stages)
    # The first micro-batch passes a chunk of every other rank before the slowest rank has work without a pause, or does
    # so on the way back (arXiv 2104.04473, section 2.2, for ranks that differ).
    bubble = (sum(stage.seconds for stage in stages) - slowest.seconds) / chunks
    return {"bubble": bubble, "messages": messages, "gathers": gathers, "data_parallel": reductions}


def _exposed(work: Work, compute: Seconds, stages: Sequence[_Stage]) -> tuple[float, float]:
    """Seconds of gathers and of reductions that the ``compute`` of each micro-batch does not hide on the rank of a
    stock schedule that has most parameters.

    With micro-batches outermost, each of them gathers twice (stage 3) and reduces (stages 2 and 3). Then gathers run
    before the compute and reductions after it; otherwise only the backward of the last micro-batch can hide a
    reduction. Stages 1 and 2 gather after the update, when nothing computes.
    """
    of, stage = work.configuration, work.configuration.zero_stage
    if work.data_group.size == 1:
        return 0.0, 0.0
    pieces = MODULES * ceil(work.model.layers / of.pipeline_ranks) if stage == 3 else 1
    parameters, experts, frozen = _most_held(stages)
    sizes, rounds = (parameters / pieces, experts / pieces), 1
    if of.micro_batch_outer:
        rounds = of.micro_batches
    gather, reduction = pieces * work.gather(*sizes, frozen / pieces), pieces * work.reduction(*sizes)
    gathers = 2 * rounds * gather if stage == 3 else 0.0
    reductions = reduction * (rounds if stage >= 2 else 1)
    after_update = gather if stage in (1, 2) else 0.0
    if not of.overlaps:
        return after_update + gathers, reductions
    exposed = max(0.0, gathers / 2 - rounds * compute.forward)
    return after_update + exposed, max(0.0, gathers / 2 + reductions - rounds * compute.backward)


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
    step of ds_lgamp by the clock, as plans have them, or by the formula if it is long."""
    on_clock = is_own(configuration) and configuration.computes <= MOST_CLOCKED_COMPUTES

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
