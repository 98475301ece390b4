"""Programs end on devices whose streams share hardware queues, if receives are posted on arrival."""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings

from ds_lgamp.schedule import transfers
from ds_lgamp.schedule.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    Kind,
    Program,
    receive_matching,
    receive_of,
    send_matching,
)
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import DeadlockError, simulate
from ds_lgamp.schedule.spec import SENDS_IN_FLIGHT, ProgramSpec
from ds_lgamp.schedule.validate import ProgramError, run_in_one_queue, validate
from tests.schedule.strategies import program_specs

LINKS = sorted(SENDS | RECEIVES)
SHARED = [
    pytest.param({}, id="no stream shares a queue"),
    *(pytest.param({"compute": "q", link: "q"}, id=f"compute and {link.value} share one") for link in LINKS),
    pytest.param({stream: "q" for stream in ("compute", *LINKS)}, id="all share one"),
]


@dataclass
class Operation:
    """Work on a device: a compute, a wait of the compute stream, a send, a receive or a collective."""

    stream: str
    after: list["Operation"]
    """Operations that must be done first."""
    partners: list["Operation"] = field(default_factory=list, compare=False, repr=False)
    """The other end of a message, or a collective on other ranks: all must have started before this one is done."""
    started: bool = field(default=False, compare=False)

    @property
    def done(self) -> bool:
        return self.started and all(partner.started for partner in self.partners)


@dataclass
class Experts:
    """Data-parallel ranks, ``expert_ranks`` of which divide experts. Dense units and experts are gathered and reduced
    in groups of their own. In every compute tokens go to experts, and the host waits until it knows how many."""

    expert_ranks: int
    data_rank: int = 0
    """That of the pipeline which is launched."""
    meetings: dict[tuple, list[Operation]] = field(default_factory=lambda: defaultdict(list))
    """The operations of all ranks that meet: those with the same number in their group."""
    launched: Counter[tuple] = field(default_factory=Counter)
    """How many collectives each rank has launched on a stream."""

    def launch(self, action: Action, rank: int, launch: Callable[[str], Operation]) -> list[Operation]:
        """Launches what goes between data-parallel ranks for an action."""
        divided, copies = self.data_rank // self.expert_ranks, self.data_rank % self.expert_ranks
        if action.kind in COMPUTE:
            groups = {"tokens": divided}
        else:
            groups = {"dense": 0, "experts": copies} if action.kind in (Kind.GATHER, Kind.REDUCE) else {}
        operations = []
        for stream, group in groups.items():
            operations.append(launch(stream))
            self.launched[stream, rank, self.data_rank] += 1
            number = self.launched[stream, rank, self.data_rank]
            self.meetings[stream, group, rank, number].append(operations[-1])
        return operations

    def meet(self) -> None:
        """Lets the ranks of every collective wait for each other, and forever for one that launches no such."""
        pipelines = self.data_rank + 1
        sizes = {"tokens": self.expert_ranks, "dense": pipelines, "experts": pipelines // self.expert_ranks}
        for (stream, *_), operations in self.meetings.items():
            missing = [Operation(stream, [])] * (sizes[stream] - len(operations))
            for operation in operations:
                operation.partners = [*operations, *missing]


def launched(spec: ProgramSpec, program: Program, experts: Experts | None = None) -> list[list[Operation]]:
    """Returns the operations of each rank in the order of their launch, as the executor and the links launch them."""
    ends: dict[Action, Operation] = {}
    ranks = []
    for rank, actions in enumerate(program):
        operations: list[Operation] = []
        compute: list[Operation] = []
        host: list[Operation] = []
        gathering: dict[int, list[Operation]] = {}
        in_flight: dict[Kind, list[Operation]] = defaultdict(list)

        def launch(
            stream: str,
            after: list[Operation],
            operations: list[Operation] = operations,
            host: list[Operation] = host,
        ) -> Operation:
            operations.append(Operation(stream, [*after, *host]))
            return operations[-1]

        for action in actions:
            if action.kind in COMPUTE:
                received = [ends[receive_of(action)]] if spec.receives_input(action) else []
                compute = [launch("compute", compute + received)]
            elif action.kind in SENDS or action.kind in RECEIVES:
                ends[action] = operation = launch(action.kind, compute)
                if action.kind in SENDS:
                    in_flight[action.kind].append(operation)
                    for oldest in in_flight[action.kind][:-SENDS_IN_FLIGHT]:
                        compute = [launch("compute", [*compute, oldest])]
            between = experts.launch(action, rank, functools.partial(launch, after=compute)) if experts else []
            if action.kind is Kind.GATHER:
                gathering[action.chunk] = between
            elif action.kind is Kind.WAIT_GATHER:
                compute = [launch("compute", [*compute, *gathering.pop(action.chunk, [])])]
            elif action.kind in COMPUTE and between:
                compute = [launch("compute", [*compute, *between])]
                host[:] = between
        launch("compute", [*compute, *(send for sends in in_flight.values() for send in sends)])
        ranks.append(operations)
    for action, operation in ends.items():
        if action.kind in SENDS:
            receive = ends[receive_matching(action)]
            operation.partners, receive.partners = [receive], [operation]
    return ranks


def finishes(ranks: list[list[Operation]], queue_of: dict[str, str]) -> bool:
    """Whether all operations are done in the end. Streams that ``queue_of`` does not name have a queue of their own."""
    waiting = [list(waiting_of(operations, queue_of)) for operations in ranks]
    progress = True
    while progress:
        progress = False
        for rank in waiting:
            for operation, stream_before, queue_before in [*rank]:
                before = [*operation.after, *([stream_before] if stream_before else [])]
                if all(one.done for one in before) and (queue_before is None or queue_before.started):
                    operation.started = progress = True
                    rank.remove((operation, stream_before, queue_before))
    return all(operation.done for operations in ranks for operation in operations)


def waiting_of(
    operations: list[Operation], queue_of: dict[str, str]
) -> Iterator[tuple[Operation, Operation | None, Operation | None]]:
    """Yields each operation with the one before it on its stream and the one before it in its queue."""
    on_stream: dict[str, Operation] = {}
    in_queue: dict[str, Operation] = {}
    for operation in operations:
        queue = queue_of.get(operation.stream, operation.stream)
        yield operation, on_stream.get(operation.stream), in_queue.get(queue)
        on_stream[operation.stream] = in_queue[queue] = operation


def configurations(receives_on_arrival: bool) -> Iterator[ProgramSpec]:
    for schedule in ("layered", "interleaved_1f1b", "1f1b", "gpipe"):
        for ranks in (2, 3, 4):
            for chunks_per_rank in (1, 2, 4) if schedule in ("layered", "interleaved_1f1b") else (1,):
                for micro_batches in (1, 2, 4, 12):
                    if schedule != "interleaved_1f1b" or micro_batches % ranks == 0:
                        placement = place_chunks("modular", ranks * chunks_per_rank, ranks)
                        yield ProgramSpec(
                            placement,
                            schedule,
                            micro_batches,
                            micro_batches,
                            zero_stage=0,
                            receives_on_arrival=receives_on_arrival,
                        )


built = functools.cache(build_program)


@pytest.mark.parametrize("queue_of", SHARED)
def test_programs_with_receives_on_arrival_end_however_streams_share_queues(queue_of):
    for spec in configurations(receives_on_arrival=True):
        assert finishes(launched(spec, built(spec)), queue_of), spec


def test_programs_with_receives_ahead_end_only_with_queues_of_their_own():
    """So it is the place of the receives that matters, and the model sees it."""
    specs = list(configurations(receives_on_arrival=False))
    apart, together = ({}, {stream: "q" for stream in ("compute", *LINKS)})
    assert all(finishes(launched(spec, built(spec)), apart) for spec in specs)
    stuck = [spec for spec in specs if not finishes(launched(spec, built(spec)), together)]
    assert len(stuck) > len(specs) / 2


def beside(pipelines: list[tuple[ProgramSpec, Program]], expert_ranks: int) -> list[list[Operation]]:
    """Returns the operations of all ranks of data-parallel ``pipelines``."""
    experts, ranks = Experts(expert_ranks), []
    for experts.data_rank, (spec, program) in enumerate(pipelines):
        ranks += launched(spec, program, experts)
    experts.meet()
    return ranks


ALL_SHARED = {stream: "q" for stream in ("compute", "tokens", "dense", "experts", *LINKS)}


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_pipelines_that_divide_experts_end_as_one_does(zero_stage):
    """What a rank does for tokens, dense units and experts stands at the same place in all data-parallel ranks'
    programs, so none waits for what another one launches later, though hosts wait for tokens."""
    for spec in configurations(receives_on_arrival=True):
        if len(spec.placement) <= 4 and spec.micro_batches <= 4:
            spec = replace(spec, zero_stage=zero_stage)
            for queue_of in ({}, ALL_SHARED):
                assert finishes(beside([(spec, built(spec))] * 4, 2), queue_of), spec


def test_pipelines_that_divide_experts_wait_forever_for_other_programs():
    """So ranks that divide experts refuse to have other numbers of micro-batches."""
    spec = ProgramSpec((0, 1, 0, 1), "layered", 4, 4, zero_stage=3, receives_on_arrival=True)
    other = replace(spec, micro_batches=2, micro_batch_group=2)
    assert not finishes(beside([(spec, built(spec)), (other, built(other))], 2), {})


@settings(max_examples=60)
@given(program_specs(max_ranks=4, max_chunks_per_rank=3, max_micro_batches=6))
def test_the_validator_agrees_with_a_model_of_streams_and_queues(spec):
    """The model has streams, events and waits. The validator only knows one queue."""
    program = build_program(spec)
    try:
        run_in_one_queue(spec, program)
        ends = True
    except DeadlockError:
        ends = False
    assert finishes(launched(spec, program), {stream: "q" for stream in ("compute", *LINKS)}) == ends


@settings(max_examples=100)
@given(program_specs(max_ranks=7, max_chunks_per_rank=4, max_micro_batches=12))
def test_every_program_with_receives_on_arrival_ends_in_one_queue(spec):
    spec = replace(spec, receives_on_arrival=True)
    run_in_one_queue(spec, build_program(spec))


def test_a_program_that_would_block_a_queue_is_refused(monkeypatch):
    """Two ranks of one queue each: both post a receive before the send that the other needs."""
    monkeypatch.setattr(transfers, "_on_arrival", transfers._early)
    spec = ProgramSpec((0, 1, 0, 1), "layered", 2, 2, zero_stage=0, receives_on_arrival=True)
    with pytest.raises(ProgramError, match="deadlock: RECV_F"):
        validate(spec, build_program(spec))


@settings(max_examples=60)
@given(program_specs(max_ranks=4, max_chunks_per_rank=3, max_micro_batches=6))
def test_a_rank_posts_receives_in_the_order_in_which_messages_are_sent(spec):
    program = build_program(replace(spec, receives_on_arrival=True))
    sent = {span.action[:3]: span.end for spans in simulate(spec, program).spans for span in spans}
    for actions in program:
        messages = [send_matching(action) for action in actions if action.kind in RECEIVES]
        kinds = {Kind.SEND_FORWARD: Kind.FORWARD, Kind.SEND_BACKWARD: Kind.BACKWARD}
        arrivals = [sent[kinds[message.kind], message.chunk, message.micro_batch] for message in messages]
        assert arrivals == sorted(arrivals)


def test_a_receive_is_posted_once_its_message_is_sent():
    """On the clock, F0.2 of rank 0 ends when F1.1 of rank 1 does. So rank 0 posts the input of F2.1 behind F0.2."""
    spec = ProgramSpec((0, 1, 0, 1), "layered", 4, 4, zero_stage=0, receives_on_arrival=True)
    texts = [str(action) for action in build_program(spec)[0]]
    forwards = texts[: texts.index("F2.0") + 1]
    assert forwards == (
        "F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_F2.0 F0.2 SEND_F0.2 RECV_F2.1 F0.3 SEND_F0.3 RECV_F2.2 F2.0".split()
    )
