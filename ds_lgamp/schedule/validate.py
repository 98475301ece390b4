"""Proves a program sound before it runs: complete, ordered, matched, free of deadlock, within its resident chunks."""

from collections import defaultdict
from collections.abc import Collection, Sequence

from ds_lgamp.schedule.actions import COMPUTE, RECEIVES, SENDS, WAITS, Action, Kind, Program, receive_matching, send_of
from ds_lgamp.schedule.passes import current_of, windows_of
from ds_lgamp.schedule.queues import run_in_one_queue
from ds_lgamp.schedule.receives import receive_posts
from ds_lgamp.schedule.simulate import DeadlockError, simulate
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.waits import Waits

_ROWS_SHOWN = 4
_BEFORE_COMPUTE = ({Kind.RELEASE}, {Kind.GATHER}, RECEIVES, {Kind.WAIT_GATHER}, {Kind.WAIT_REDUCE})
"""Kinds that may stand before a compute, in this order."""
_PLACE = {kind: place for place, kinds in enumerate(_BEFORE_COMPUTE) for kind in kinds}


class ProgramError(ValueError):
    """A faulty program. The message names the rank, the row and the fault, and shows the rows around it."""

    def __init__(self, fault: str, rank: int, row: int, actions: Sequence[Action]) -> None:
        self.rank, self.row = rank, row
        super().__init__(f"pipeline rank {rank}, row {row}: {fault}\n{_rows_around(row, actions)}")


def validate(spec: ProgramSpec, program: Program) -> None:
    """Checks the program of each rank by itself, then all programs together.

    Raises ProgramError if a rank's program is faulty or if the ranks deadlock. Receives that are posted ahead must
    allow every SEND to block until its RECV is posted. Receives that are posted on arrival must allow a device to put
    all its work into one hardware queue. Raises ValueError if the number of ranks is wrong.
    """
    if len(program) != spec.pipeline_ranks:
        raise ValueError(f"the program has {len(program)} ranks, its placement {spec.pipeline_ranks}")
    for rank, actions in enumerate(program):
        _RankCheck(spec, rank, actions).run()
    _check_channels(spec, program)
    try:
        if spec.receives_on_arrival:
            run_in_one_queue(spec, program)
        else:
            simulate(spec, program, blocking_sends=True)
    except DeadlockError as deadlock:
        rank = next(rank for rank, row in enumerate(deadlock.positions) if row < len(program[rank]))
        row = deadlock.positions[rank]
        raise ProgramError(f"deadlock: {program[rank][row]} waits forever", rank, row, program[rank]) from None


class _RankCheck:
    """Compares the actions of one rank with the compute order of its schedule.

    Between two computes, actions stand in this order: SEND and REDUCE of the first; then RELEASE, GATHER, RECV and the
    waits of the second.
    """

    def __init__(self, spec: ProgramSpec, rank: int, actions: Sequence[Action]) -> None:
        self.spec, self.rank, self.actions = spec, rank, actions
        self.row = 0
        self.resident: list[int] = []

    def run(self) -> None:
        spec = self.spec
        computes = list(spec.computes(self.rank))
        posts = receive_posts(spec, self.rank, computes)
        windows = windows_of(spec, computes)
        self.current = current_of(spec, computes)
        self.waits = Waits(spec, self.current)
        self.resident = list(self.current)
        visited = None
        for compute, receives in zip(computes, posts):
            preparation = self.preparation_rows()
            if compute.chunk != visited:
                visited = compute.chunk
                self.check_partition(preparation, next(windows))
            else:
                self.check_partition(preparation, self.resident)
            if spec.zero_stage > 0 and compute.chunk not in self.resident:
                raise self.fault(f"{compute} needs chunk {compute.chunk}, which is not gathered")
            self.check_same(preparation, RECEIVES, receives, "posts", "the receives to post here are")
            self.check_same(preparation, WAITS, self.waits.before(compute), "waits", "the waits that stand here are")
            self.expect(compute, "the schedule's next compute is")
            if spec.sends_output(compute):
                self.expect(send_of(compute), "the result must be sent at once by")
            if spec.is_final_backward(compute):
                self.launch(Action(Kind.REDUCE, compute.chunk), "the chunk's gradient is final; next must be")
        self.check_end()

    def preparation_rows(self) -> list[Action]:
        """Returns the actions up to the next compute. Raises ProgramError if one does not belong there."""
        start, place = self.row, 0
        while self.row < len(self.actions) and self.actions[self.row].kind not in COMPUTE:
            action = self.actions[self.row]
            if action.kind not in _PLACE:
                raise self.fault(f"{action} does not belong here")
            if _PLACE[action.kind] < place:
                order = ", ".join(" and ".join(sorted(kinds)) for kinds in _BEFORE_COMPUTE)
                raise self.fault(f"{action} is out of order: {order} stand in this order")
            place = _PLACE[action.kind]
            self.row += 1
        return list(self.actions[start : self.row])

    def check_partition(self, preparation: list[Action], window: list[int]) -> None:
        releases = [action.chunk for action in preparation if action.kind is Kind.RELEASE]
        gathers = [action.chunk for action in preparation if action.kind is Kind.GATHER]
        if releases != sorted(set(self.resident) - set(window)):
            raise self.fault(
                f"releases {releases}; with {sorted(self.resident)} resident, {sorted(window)} must remain"
            )
        if gathers != [chunk for chunk in window if chunk not in self.resident]:
            raise self.fault(f"gathers {gathers}; with {sorted(self.resident)} resident, {window} must be")
        self.resident = [chunk for chunk in self.resident if chunk not in releases] + gathers
        for chunk in gathers:
            self.waits.before(Action(Kind.GATHER, chunk))
        if self.spec.zero_stage == 3 and len(self.resident) > self.spec.resident_chunks:
            raise self.fault(f"{len(self.resident)} chunks are resident; at most {self.spec.resident_chunks} may be")

    def check_same(
        self, preparation: list[Action], kinds: Collection[Kind], expected: list[Action], does: str, must: str
    ) -> None:
        found = [action for action in preparation if action.kind in kinds]
        if found != expected:
            raise self.fault(f"{does} {_texts(found)}; {must} {_texts(expected)}")

    def check_end(self) -> None:
        if self.spec.zero_stage == 3:
            for chunk in sorted(self.resident):
                self.expect(Action(Kind.RELEASE, chunk), "after the last compute follows")
        if not self.spec.forward_only:
            step = Action(Kind.STEP)
            for wait in self.waits.before(step):
                self.expect(wait, "the step needs all gradients; next must be")
            self.expect(step, "after the last compute follows")
            for chunk in self.current:
                self.expect(Action(Kind.GATHER, chunk), "what the step updated is gathered next by")
        if self.row < len(self.actions):
            raise self.fault(f"{self.actions[self.row]} follows the end of the program")

    def launch(self, action: Action, reason: str) -> None:
        """Expects a collective, and records it for the waits that must follow."""
        self.expect(action, reason)
        self.waits.before(action)

    def expect(self, action: Action, reason: str) -> None:
        if self.row >= len(self.actions) or self.actions[self.row] != action:
            found = self.actions[self.row] if self.row < len(self.actions) else "the end"
            raise self.fault(f"{reason} {action}, found {found}")
        self.row += 1

    def fault(self, text: str) -> ProgramError:
        return ProgramError(text, self.rank, min(self.row, len(self.actions) - 1), self.actions)


def _check_channels(spec: ProgramSpec, program: Program) -> None:
    """Checks that sends and posts of each channel (source, destination, kind) come in the same order. A channel
    delivers messages in order."""
    sends: dict[tuple[int, int, bool], list[tuple[int, int, int]]] = defaultdict(list)
    posts: dict[tuple[int, int, bool], list[tuple[int, int, int]]] = defaultdict(list)
    for rank, actions in enumerate(program):
        for row, action in enumerate(actions):
            kind = action.kind
            if kind in SENDS:
                target = receive_matching(action).chunk
                channel = rank, spec.placement[target], kind is Kind.SEND_FORWARD
                sends[channel].append((target, action.micro_batch, row))
            elif kind in RECEIVES:
                forward = kind is Kind.RECV_FORWARD
                source = action.chunk - 1 if forward else action.chunk + 1
                posts[spec.placement[source], rank, forward].append((action.chunk, action.micro_batch, row))
    for channel in sends.keys() | posts.keys():
        _check_channel(channel, sends[channel], posts[channel], program)


def _check_channel(
    channel: tuple[int, int, bool],
    sent: list[tuple[int, int, int]],
    posted: list[tuple[int, int, int]],
    program: Program,
) -> None:
    source, destination, _ = channel
    for send, post in zip(sent, posted):
        if send[:2] != post[:2]:
            action = program[destination][post[2]]
            fault = f"{action} is posted where rank {source} sends {program[source][send[2]]}"
            raise ProgramError(fault, destination, post[2], program[destination])
    if len(sent) != len(posted):
        rank, rows = (source, sent) if len(sent) > len(posted) else (destination, posted)
        row = rows[min(len(sent), len(posted))][2]
        raise ProgramError(f"{program[rank][row]} has no counterpart on the other rank", rank, row, program[rank])


def _texts(actions: Sequence[Action]) -> str:
    return " ".join(map(str, actions)) or "none"


def _rows_around(row: int, actions: Sequence[Action]) -> str:
    first = max(0, row - _ROWS_SHOWN)
    return "\n".join(
        f"{'>' if index == row else ' '} {index:6d} {actions[index]}"
        for index in range(first, min(len(actions), row + _ROWS_SHOWN + 1))
    )
