"""Proves a program sound before it runs: complete, ordered, matched, free of deadlock, within its resident chunks."""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from ds_lgamp.schedule import offload, stored_inputs
from ds_lgamp.schedule.actions import COMPUTE, RECEIVES, SENDS, Action, Kind, Program, receive_matching, send_of
from ds_lgamp.schedule.passes import (
    Window,
    add_loads,
    add_stored_inputs,
    add_stores,
    behind_step,
    started_of,
    windows_of,
)
from ds_lgamp.schedule.queues import run_in_one_queue
from ds_lgamp.schedule.receives import receive_posts
from ds_lgamp.schedule.simulate import DeadlockError, simulate
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.waits import Waits

_ROWS_SHOWN = 4
_GATHERS = {Kind.WAIT_REFRESH, Kind.GATHER}
_REDUCTIONS = {Kind.WAIT_REDUCE, Kind.COMBINE, Kind.WAIT_COMBINE}
_BEFORE_COMPUTE = ({Kind.RELEASE}, {Kind.REFRESH}, _GATHERS, RECEIVES, {Kind.WAIT_GATHER}, _REDUCTIONS)
"""Kinds that may stand before a compute, in this order."""


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
        if spec.offload is None and not spec.stores_inputs:
            _RankCheck(spec, rank, actions).run()
        else:
            _check_with_host(spec, rank, actions)
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


def _check_with_host(spec: ProgramSpec, rank: int, actions: Sequence[Action]) -> None:
    """Checks that no transfer or update can come too early or too late, then the rest of the program, then that every
    transfer and update has its one place."""
    fault = _fault_on_host(spec, actions)
    if fault is None:
        expected = stored_inputs.without_stored_inputs(actions)
        if spec.offload is not None:
            expected = offload.without_transfers(expected)
        _RankCheck(spec, rank, expected).run()
        for add in (add_loads, add_stores, add_stored_inputs):
            expected = add(spec, rank, expected)
        fault = offload.misplaced(actions, expected)
    if fault is not None:
        raise ProgramError(fault[1], rank, min(fault[0], len(actions) - 1), actions)


def _fault_on_host(spec: ProgramSpec, actions: Sequence[Action]) -> tuple[int, str] | None:
    """Returns the row of the first transfer or update that comes too early or too late, and the fault."""
    fault = None if spec.offload is None else offload.fault_of(spec.offload, actions)
    if fault is None and spec.stores_inputs:
        fault = stored_inputs.fault_of(actions)
    return fault


class _RankCheck:
    """Compares the actions of one rank with the compute order of its schedule.

    Between two computes, actions stand in this order: SEND and REDUCE of the first; then RELEASE, REFRESH, GATHER, RECV
    and the waits of the second. ``spec.updates_on_device`` says whether an UPDATE stands with the gathers or with the
    waits for reductions. What offloading adds is checked by itself.
    """

    def __init__(self, spec: ProgramSpec, rank: int, actions: Sequence[Action]) -> None:
        self.spec, self.rank, self.actions = spec, rank, actions
        self.row = 0
        self.started = Window([], [])
        """What was refreshed, and what is resident."""
        self.updated: set[int] = set()
        """Chunks whose update stands ahead."""
        self.backwards: Counter[int] = Counter()
        """How many of each chunk stand ahead."""
        self.gathers = Kind.REFRESH if spec.updated_by is Kind.REFRESH else Kind.GATHER
        """What a postponed update stands with."""
        beside = {"reduction": Kind.WAIT_REDUCE, "next_step": self.gathers}.get(spec.updates_on_device)
        self.before_compute = [{*kinds, Kind.UPDATE} if beside in kinds else kinds for kinds in _BEFORE_COMPUTE]
        """Kinds that may stand before a compute, in this order."""

    def run(self) -> None:
        spec = self.spec
        order = list(spec.computes(self.rank))
        posts = iter(receive_posts(spec, self.rank, [action for action in order if action.kind in COMPUTE]))
        windows = windows_of(spec, order)
        self.behind_step = behind_step(spec, order)
        self.waits = Waits(spec, self.behind_step)
        self.started = started_of(spec, order)
        visited = None
        for compute in order:
            if compute.kind is Kind.RETURN:
                visited = None
                self.expect_releases(f"ahead of {compute} stands")
                self.expect(compute, "after the last compute of a call follows")
                continue
            receives = next(posts)
            preparation = self.preparation_rows()
            if compute.chunk != visited:
                visited = compute.chunk
                self.check_partition(preparation, next(windows), compute.chunk)
            else:
                self.check_partition(preparation, self.started, compute.chunk)
            if spec.zero_stage > 0 and compute.chunk not in self.started.resident:
                raise self.fault(f"{compute} needs chunk {compute.chunk}, which is not gathered")
            self.check_same(preparation, RECEIVES, receives, "posts", "the receives to post here are")
            waits = self.with_updates(self.waits.before(compute))
            kinds = {Kind.WAIT_GATHER, *self.before_compute[-1]}
            self.check_same(preparation, kinds, waits, "waits", "the waits that stand here are")
            self.expect(compute, "the schedule's next compute is")
            if compute.kind is Kind.BACKWARD:
                self.backwards[compute.chunk] += 1
            if spec.sends_output(compute):
                self.expect(send_of(compute), "the result must be sent at once by")
            if spec.is_final_backward(compute):
                self.launch(Action(Kind.REDUCE, compute.chunk), "the chunk's gradient is final; next must be")
        self.check_end()

    def preparation_rows(self) -> list[Action]:
        """Returns the actions up to the next compute. Raises ProgramError if one does not belong there."""
        places = {kind: place for place, kinds in enumerate(self.before_compute) for kind in kinds}
        start, place = self.row, 0
        while self.row < len(self.actions) and self.actions[self.row].kind not in COMPUTE:
            action = self.actions[self.row]
            if action.kind not in places:
                raise self.fault(f"{action} does not belong here")
            if places[action.kind] < place:
                order = ", ".join(" and ".join(sorted(kinds)) for kinds in self.before_compute)
                raise self.fault(f"{action} is out of order: {order} stand in this order")
            place = places[action.kind]
            self.row += 1
        return list(self.actions[start : self.row])

    def check_partition(self, preparation: list[Action], window: Window, visited: int) -> None:
        refreshed, resident = self.started
        releases, refreshes, gathers = (
            [action.chunk for action in preparation if action.kind is kind]
            for kind in (Kind.RELEASE, Kind.REFRESH, Kind.GATHER)
        )
        if releases != sorted(set(resident) - set(window.resident)):
            raise self.fault(
                f"releases {releases}; with {sorted(resident)} resident, {sorted(window.resident)} must remain"
            )
        if refreshes != [chunk for chunk in window.refreshed if chunk not in refreshed]:
            raise self.fault(f"refreshes {refreshes}; with {refreshed} refreshed, {window.refreshed} must be")
        if gathers != [chunk for chunk in window.resident if chunk not in resident]:
            raise self.fault(f"gathers {gathers}; with {sorted(resident)} resident, {window.resident} must be")
        if self.spec.updates_on_device == "next_step":
            self.check_postponed_updates(preparation, visited)
        for chunk in refreshes:
            self.waits.before(Action(Kind.REFRESH, chunk))
        launches = [Action(Kind.GATHER, chunk) for chunk in gathers]
        launches = [each for launch in launches for each in (*self.waits.before(launch), launch)]
        self.check_same(preparation, _GATHERS, launches, "gathers by", "each gather follows its wait:")
        resident = [chunk for chunk in resident if chunk not in releases] + gathers
        self.started = Window(refreshed + refreshes, resident)
        if self.spec.zero_stage == 3 and len(resident) > self.spec.resident_chunks:
            raise self.fault(f"{len(resident)} chunks are resident; at most {self.spec.resident_chunks} may be")

    def check_postponed_updates(self, preparation: list[Action], visited: int) -> None:
        """Checks that each chunk is updated once, directly ahead of its first gather, or else of its first visit."""
        launches = [action for action in preparation if action.kind is self.gathers]
        expected: list[Action] = []
        for action in [*launches, Action(Kind.FORWARD, visited)]:
            trains = action.chunk >= self.spec.first_trained and not self.spec.forward_only
            if trains and action.chunk not in self.updated:
                self.updated.add(action.chunk)
                expected.append(Action(Kind.UPDATE, action.chunk))
            if action.kind is self.gathers:
                expected.append(action)
        kinds = {Kind.UPDATE, self.gathers}
        self.check_same(preparation, kinds, expected, "updates and gathers", "the updates and gathers here are")

    def with_updates(self, waits: list[Action]) -> list[Action]:
        """Returns ``waits`` with the updates that follow reductions. A chunk is updated once: when all its backwards
        are done, directly behind the end of its reduction."""
        if self.spec.updates_on_device != "reduction":
            return waits
        expected = []
        for wait in waits:
            expected.append(wait)
            is_final = wait.kind is self.spec.end_of_reduction and self.backwards[wait.chunk] == self.spec.micro_batches
            if is_final and wait.chunk not in self.updated:
                self.updated.add(wait.chunk)
                expected.append(Action(Kind.UPDATE, wait.chunk))
        return expected

    def check_same(
        self, preparation: list[Action], kinds: Collection[Kind], expected: list[Action], does: str, must: str
    ) -> None:
        found = [action for action in preparation if action.kind in kinds]
        if found != expected:
            raise self.fault(f"{does} {_texts(found)}; {must} {_texts(expected)}")

    def check_end(self) -> None:
        self.expect_releases("after the last compute follows")
        if not self.spec.forward_only:
            step = Action(Kind.STEP)
            for action in self.with_updates(self.waits.before(step)):
                self.expect(action, "the step needs all gradients; next must be")
            if self.spec.updates_on_device != "step" and self.backwards.keys() != self.updated:
                raise self.fault(f"chunks {sorted(self.backwards.keys() - self.updated)} are not updated before {step}")
            self.expect(step, "after the last compute follows")
            for launch in self.behind_step:
                self.expect(launch, "what the step updated is gathered next by")
        if self.row < len(self.actions):
            raise self.fault(f"{self.actions[self.row]} follows the end of the program")

    def expect_releases(self, reason: str) -> None:
        """Expects that stage 3 releases all that is resident."""
        if self.spec.zero_stage == 3:
            for chunk in sorted(self.started.resident):
                self.expect(Action(Kind.RELEASE, chunk), reason)
            self.started = Window(self.started.refreshed, [])

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
