"""A program waits for each gather and reduction once: early enough, and as late as possible."""

from hypothesis import given

from ds_lgamp.schedule.actions import COMPUTE, Kind
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.spec import ProgramSpec
from tests.schedule.strategies import program_specs


class Held:
    """The collectives that a rank has under way. Follows the actions without the pass that placed the waits."""

    def __init__(self, gathering, refreshing):
        self.gathering, self.refreshing = set(gathering), set(refreshing)
        self.accumulating, self.reducing, self.combining = set(), [], []
        self.summed = None
        """The chunk whose reduction inside a node was awaited and that no COMBINE has followed."""
        self.hidden = set()
        """Chunks whose reduction began before the last compute."""

    def check(self, spec, action, before):
        """Checks one action. ``before`` is the action before it."""
        kind, chunk, *_ = action
        if kind is Kind.WAIT_GATHER:
            self.gathering.remove(chunk)
        elif kind is Kind.WAIT_REDUCE:
            assert self.reducing.pop(0) == chunk, "a rank waits for the oldest first"
            self.summed = chunk if spec.hierarchy else None
        elif kind is Kind.COMBINE:
            assert self.summed == chunk and len(self.combining) < spec.resident_chunks
            self.combining.append(chunk)
            self.summed = None
        elif kind is Kind.WAIT_COMBINE:
            assert self.combining.pop(0) == chunk, "a rank waits for the oldest first"
        elif kind is Kind.REFRESH:
            self.refreshing.add(chunk)
        elif kind is Kind.WAIT_REFRESH:
            self.refreshing.remove(chunk)
        elif kind in COMPUTE:
            assert self.summed is None
            goes_on = spec.hierarchy or spec.offload
            assert not goes_on or not self.hidden & set(self.reducing), "one compute hides a reduction"
            self.hidden = set(self.reducing)
            assert chunk not in self.gathering
            assert before is None or before.kind is not Kind.WAIT_GATHER or before.chunk == chunk
        if kind is Kind.BACKWARD and chunk not in self.accumulating:
            held = len(self.accumulating) + len(self.reducing)
            assert chunk not in self.reducing and chunk not in self.combining
            assert spec.zero_stage == 0 or not self.reducing or held < spec.resident_chunks
            if before.kind is Kind.WAIT_REDUCE and before.chunk != chunk and not spec.offload:
                assert held + 1 == spec.resident_chunks or not self.reducing, "a rank waits as late as possible"
            self.accumulating.add(chunk)
        elif kind is Kind.GATHER:
            assert chunk not in self.refreshing
            self.gathering.add(chunk)
        elif kind is Kind.REDUCE:
            self.accumulating.discard(chunk)
            self.reducing.append(chunk)
        elif kind is Kind.STEP:
            assert not self.reducing and not self.accumulating and not self.gathering
            assert not self.refreshing and not self.combining and self.summed is None


@given(program_specs())
def test_nothing_computes_on_what_is_under_way_and_no_wait_is_longer_than_it_must(spec):
    for actions in build_program(spec):
        steps = [row for row, action in enumerate(actions) if action.kind is Kind.STEP]
        behind = {
            kind: {action.chunk for row in steps for action in actions[row:] if action.kind is kind}
            for kind in (Kind.GATHER, Kind.REFRESH)
        }
        started = dict(behind)
        brought_by = spec.chunk_updates[actions[0].chunk].brought_by
        if spec.forward_only and brought_by is not None and not spec.defers_gathers:
            started[brought_by] = {action.chunk for action in actions if action.chunk >= 0}
        held = Held(started[Kind.GATHER], started[Kind.REFRESH])
        for before, action in zip([None, *actions], actions):
            held.check(spec, action, before)
        assert held.gathering == behind[Kind.GATHER] and held.refreshing == behind[Kind.REFRESH]
        assert not held.reducing and not held.combining


def test_a_chunk_waits_for_its_own_reduction_when_its_next_group_begins():
    spec = ProgramSpec((0,), "layered", 2, 1, 2)
    actions = build_program(spec)[0]
    texts = " ".join(map(str, actions))
    assert "B0.0 REDUCE0 F0.1 WAIT_REDUCE0 B0.1 REDUCE0 WAIT_REDUCE0 STEP" in texts
