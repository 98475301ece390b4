"""Proves a program sound before it runs: complete, ordered, matched, free of deadlock, within its resident chunks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ds_lgamp.schedule.actions import Action, Program
from ds_lgamp.schedule.queues import run_in_one_queue
from ds_lgamp.schedule.rules.gradients import check_gradients
from ds_lgamp.schedule.rules.inputs import check_inputs, check_recomputation
from ds_lgamp.schedule.rules.messages import check_arrivals, check_channels, check_receives, check_sends
from ds_lgamp.schedule.rules.stops import Fault, Stop, check_layout, check_order, cut
from ds_lgamp.schedule.rules.weights import check_weights
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

    Raises ProgramError if a rank's program breaks a rule or if the ranks deadlock. Receives that are posted ahead must
    allow every SEND to block until its RECV is posted. Receives that are posted on arrival must allow a device to put
    all its work into one hardware queue. Raises ValueError if the number of ranks is wrong.
    """
    if len(program) != spec.pipeline_ranks:
        raise ValueError(f"the program has {len(program)} ranks, its placement {spec.pipeline_ranks}")
    stops = [cut(actions) for actions in program]
    for rank, of_rank in enumerate(stops):
        with _told(program, rank):
            _check_rank(spec, rank, of_rank)
    with _told(program):
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
            with _told(program, rank):
                check_arrivals(of_rank, [span.start for span in spans[rank]], ends)


@contextmanager
def _told(program: Program, rank: int = 0) -> Iterator[None]:
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
    check_layout(spec, stops)


def _rows_around(row: int, actions: Sequence[Action]) -> str:
    first = max(0, row - _ROWS_SHOWN)
    return "\n".join(
        f"{'>' if index == row else ' '} {index:6d} {actions[index]}"
        for index in range(first, min(len(actions), row + _ROWS_SHOWN + 1))
    )
