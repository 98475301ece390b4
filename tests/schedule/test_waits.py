"""A program waits for each gather and reduction once: early enough, and as late as possible."""

from hypothesis import given

from ds_lgamp.schedule.actions import COMPUTE, Kind
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.spec import ProgramSpec
from tests.schedule.strategies import program_specs


class Held:
    """The collectives that a rank has under way. Follows the actions without the pass that placed the waits."""

    def __init__(self, gathering):
        self.gathering, self.accumulating, self.reducing = set(gathering), set(), []

    def check(self, spec, action, before):
        """Checks one action. ``before`` is the action before it."""
        kind, chunk, _ = action
        if kind is Kind.WAIT_GATHER:
            self.gathering.remove(chunk)
        elif kind is Kind.WAIT_REDUCE:
            assert self.reducing.pop(0) == chunk, "a rank waits for the oldest first"
        elif kind in COMPUTE:
            assert chunk not in self.gathering
            assert before is None or before.kind is not Kind.WAIT_GATHER or before.chunk == chunk
        if kind is Kind.BACKWARD and chunk not in self.accumulating:
            held = len(self.accumulating) + len(self.reducing)
            assert chunk not in self.reducing
            assert spec.zero_stage == 0 or not self.reducing or held < spec.resident_chunks
            if before.kind is Kind.WAIT_REDUCE and before.chunk != chunk:
                assert held + 1 == spec.resident_chunks or not self.reducing, "a rank waits as late as possible"
            self.accumulating.add(chunk)
        elif kind is Kind.GATHER:
            self.gathering.add(chunk)
        elif kind is Kind.REDUCE:
            self.accumulating.discard(chunk)
            self.reducing.append(chunk)
        elif kind is Kind.STEP:
            assert not self.reducing and not self.accumulating and not self.gathering


@given(program_specs())
def test_nothing_computes_on_what_is_under_way_and_no_wait_is_longer_than_it_must(spec):
    for actions in build_program(spec):
        steps = [row for row, action in enumerate(actions) if action.kind is Kind.STEP]
        behind = {action.chunk for row in steps for action in actions[row:] if action.kind is Kind.GATHER}
        evaluates_current = spec.forward_only and spec.zero_stage in (1, 2) and not spec.defers_gathers
        held = Held({action.chunk for action in actions if action.chunk >= 0} if evaluates_current else behind)
        for before, action in zip([None, *actions], actions):
            held.check(spec, action, before)
        assert held.gathering == behind and not held.reducing


def test_a_chunk_waits_for_its_own_reduction_when_its_next_group_begins():
    spec = ProgramSpec((0,), "layered", 2, 1, 2)
    actions = build_program(spec)[0]
    texts = " ".join(map(str, actions))
    assert "B0.0 REDUCE0 F0.1 WAIT_REDUCE0 B0.1 REDUCE0 WAIT_REDUCE0 STEP" in texts
