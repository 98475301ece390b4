"""Programs with one fault, all of which the validator refuses."""

import pytest

from ds_lgamp.schedule.actions import COMPUTE, Kind
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.validate import ProgramError, validate


def assert_every_mutation_is_refused(spec, rank):
    """Validates the program once for every mutation of what ``rank`` does."""
    program = build_program(spec)
    for kind, row, mutated in _mutations(program[rank]):
        faulty = [*program]
        faulty[rank] = mutated
        with pytest.raises(ProgramError):
            validate(spec, faulty)
            pytest.fail(f"{kind} of row {row} was accepted: {program[rank][row]}")


def _mutations(actions):
    """Yields every program with one action dropped, duplicated or swapped, or one compute marked otherwise."""
    for row in range(len(actions)):
        yield "drop", row, actions[:row] + actions[row + 1 :]
        yield "duplicate", row, actions[: row + 1] + actions[row:]
        if actions[row].kind in COMPUTE:
            marked = actions[row]._replace(recomputed=not actions[row].recomputed)
            yield "mark", row, [*actions[:row], marked, *actions[row + 1 :]]
        # A second part of a backward may run earlier or later.
        if row + 1 < len(actions) and Kind.WEIGHTS_BACKWARD not in (actions[row].kind, actions[row + 1].kind):
            swapped = [*actions[:row], actions[row + 1], actions[row], *actions[row + 2 :]]
            yield "swap", row, swapped
