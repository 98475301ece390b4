"""Proves a program sound before it runs: complete, ordered, matched, free of deadlock, within its resident chunks."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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
from ds_lgamp.schedule.rules.gradients import check_gradients
from ds_lgamp.schedule.rules.order import (
    Fault,
    Stop,
    check_arrivals,
    check_channels,
    check_layout,
    check_order,
    check_receives,
    check_sends,
    check_starts,
    cut,
)
from ds_lgamp.schedule.rules.weights import check_inputs, check_recomputation, check_weights
from ds_lgamp.schedule.simulate import DeadlockError, simulate
from ds_lgamp.schedule.spec import ProgramSpec

_ROWS_SHOWN = 4


class ProgramError(ValueError):
    """A faulty program. The message names the rank, the row and the fault, and shows the rows around it."""

    def __init__(self, fault: str, rank: int, row: int, actions: Sequence[Action]) -> None:
        self.rank, self.row = rank, min(row, len(actions) - 1)
        super().__init__(f"pipeline rank {rank}, row {self.row}: {fault}\n{_rows_around(self.row, actions)}")


def validate(spec: ProgramSpec, program: Program) -> None:
    """Checks the program of each rank by itself, then all programs together.

    The rules (:mod:`ds_lgamp.schedule.rules`) know nothing of the passes that made the program.

    Raises ProgramError if a rank's program breaks a rule or if the ranks deadlock. Receives that are posted early must
    allow every SEND to block until its RECV is posted. Receives that are posted on arrival must allow a device to put
    all its work into one hardware queue. Raises ValueError if the number of ranks is wrong.
    """
    if len(program) != spec.pipeline_ranks:
        raise ValueError(f"the program has {len(program)} ranks, its placement {spec.pipeline_ranks}")
    stops = [cut(actions) for actions in program]
    for rank, of_rank in enumerate(stops):
        with _faults_shown(program, rank):
            _check_rank(spec, rank, of_rank)
    with _faults_shown(program):
        check_channels(spec, program)
    try:
        if spec.receives_on_arrival:
            run_in_one_queue(spec, program)
        spans = simulate(spec, program, blocking_sends=not spec.receives_on_arrival).spans
    except DeadlockError as deadlock:
        rank = next(rank for rank, row in enumerate(deadlock.positions) if row < len(program[rank]))
        row = deadlock.positions[rank]
        raise ProgramError(f"deadlock: {program[rank][row]} waits forever", rank, row, program[rank]) from None
    if spec.receives_on_arrival:
        ends = {span.action[:3]: span.end for spans_of_rank in spans for span in spans_of_rank}
        for rank, of_rank in enumerate(stops):
            with _faults_shown(program, rank):
                starts = [span.start for span in spans[rank] if span.action.kind in COMPUTE]
                check_arrivals(of_rank, starts, ends)


@contextmanager
def _faults_shown(program: Program, rank: int = 0) -> Iterator[None]:
    """Raises a Fault as ProgramError, of ``rank`` if the fault names none."""
    try:
        yield
    except Fault as fault:
        rank = rank if fault.rank is None else fault.rank
        raise ProgramError(str(fault), rank, fault.row, program[rank]) from None


def _check_rank(spec: ProgramSpec, rank: int, stops: Sequence[Stop]) -> None:
    check_order(spec, rank, stops)
    check_sends(spec, stops)
    check_weights(spec, stops)
    check_receives(spec, rank, stops)
    check_gradients(spec, stops)
    check_recomputation(spec, stops)
    check_inputs(spec, stops)
    check_starts(spec, stops)
    check_layout(spec, stops)


def _rows_around(row: int, actions: Sequence[Action]) -> str:
    first = max(0, row - _ROWS_SHOWN)
    return "\n".join(
        f"{'>' if index == row else ' '} {index:6d} {actions[index]}"
        for index in range(first, min(len(actions), row + _ROWS_SHOWN + 1))
    )


def run_in_one_queue(spec: ProgramSpec, program: Program) -> None:
    """Raises DeadlockError if a rank of ``program`` cannot start all its operations."""
    queues = _Queues(spec, program)
    runnable = list(range(len(program)))
    while runnable:
        runnable.extend(queues.advance(runnable.pop()))
    if any(position < len(actions) for position, actions in zip(queues.position, program)):
        raise DeadlockError(queues.position)


class _Queues:
    """The work of each rank in one hardware queue.

    The streams of a GPU may share hardware queues. ``CUDA_DEVICE_MAX_CONNECTIONS`` sets how many there are; Megatron-LM
    asks for one. A queue starts its work in the order in which the host launched it:

    - An operation starts once everything before it in its queue has started, everything before it on its stream is
      done, and what its stream waits for is done.
    - Every link has a stream for each kind of message. A send is done once its receive has started, a receive once its
      send has started. No buffer in between holds a message.
    - A compute that needs a message waits for the receive.
    - Gathers and reductions start together on all data-parallel ranks, because these run the same program. So do, on
      ranks that divide experts, those of experts, and inside computes the all-to-alls of tokens: a host that waits for
      how many tokens come waits for nothing that other ranks launch later.
    - A script's turn begins when all pipeline ranks have launched everything before it: hosts meet, because outputs
      travel.
    - Transfers between host and device, and updates on the host, wait for nothing but their own rank's work.

    One queue is the hardest case: spreading the streams over more queues only removes conditions. So a program that
    ends with one queue ends with any number of them, whichever streams share them.
    """

    def __init__(self, spec: ProgramSpec, program: Program) -> None:
        self.spec, self.program = spec, program
        self.position = [0] * len(program)
        """The next action of each rank to start."""
        self.started: set[Action] = set()
        """Sends, receives and turns of the script that have started."""
        self.newest: dict[tuple[int, Kind, int], Action] = {}
        """The last send or receive on each stream: by rank, kind and the rank at the other end."""
        self.blocked: dict[Action, list[int]] = defaultdict(list)
        """Ranks whose queue waits for a send or receive to start, or for others at a RETURN."""
        self.returned: dict[Action, set[int]] = defaultdict(set)
        """The ranks that have come to a RETURN."""

    def advance(self, rank: int) -> list[int]:
        """Starts the work of ``rank`` up to the first operation that must wait. Returns the ranks that this wakes."""
        woken: list[int] = []
        actions = self.program[rank]
        while self.position[rank] < len(actions):
            action = actions[self.position[rank]]
            if action.kind is Kind.RETURN:
                self.returned[action].add(rank)
                if len(self.returned[action]) == len(self.program):
                    self.started.add(action)
                    woken.extend(self.blocked.pop(action, ()))
            awaited = self.awaited(rank, action)
            if awaited is not None and awaited not in self.started:
                self.blocked[awaited].append(rank)
                break
            if action.kind in SENDS or action.kind in RECEIVES:
                self.started.add(action)
                self.newest[rank, action.kind, self.spec.peer(action)] = action
                woken.extend(self.blocked.pop(action, ()))
            self.position[rank] += 1
        return woken

    def awaited(self, rank: int, action: Action) -> Action | None:
        """Returns the other rank's send or receive that must start before ``action`` can start; RETURN itself, which
        starts once all ranks have come to it; None if there is none."""
        if action.kind is Kind.RETURN:
            return action
        if action.kind is Kind.START_FORWARD:
            action = action._replace(kind=Kind.FORWARD)
        if action.kind in COMPUTE:
            return send_matching(receive_of(action)) if self.spec.receives_input(action) else None
        if action.kind not in SENDS and action.kind not in RECEIVES:
            return None
        before = self.newest.get((rank, action.kind, self.spec.peer(action)))
        if before is None:
            return None
        return receive_matching(before) if before.kind in SENDS else send_matching(before)
