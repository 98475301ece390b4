"""Who is to blame where ranks stand still: every program, with one rank stopped or one message lost."""

from collections import defaultdict

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ds_lgamp.schedule.actions import (
    COLLECTIVES,
    RECEIVES,
    SENDS,
    WAITS,
    Action,
    Kind,
    awaited_by,
    receive_matching,
    receive_of,
    send_matching,
)
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.spec import SENDS_IN_FLIGHT, ProgramSpec
from ds_lgamp.watch.culprit import Cause, Silent, find, stalled_longest, without_hub
from ds_lgamp.watch.standing import Neighbours, Standing, Wait, done_before, listed, waits_in
from tests.schedule.strategies import program_specs

SECONDS, LIMIT = 40.0, 120.0


class Ranks:
    """Runs programs as far as they come. Data-parallel ranks vary fastest in the numbers of ranks.

    Args:
        stopped: a rank and the row at which it stands still.
        lost: a send whose message does not arrive: its rank and kind, the receiver, and its number on that link.
    """

    def __init__(self, spec, data_ranks, stopped=None, lost=None):
        self.spec, self.data_ranks, self.stopped, self.lost = spec, data_ranks, stopped, lost
        self.program = build_program(spec)
        self.world = spec.pipeline_ranks * data_ranks
        self.rows = [0] * self.world
        self.did = [defaultdict(int) for _ in range(self.world)]
        """By rank, how many sends and posts of each kind and link, and collectives, it has begun."""
        while any([self.advance(rank) for rank in range(self.world)]):
            pass

    def actions(self, rank):
        return self.program[rank // self.data_ranks]

    def neighbours(self, rank):
        stage, replica = divmod(rank, self.data_ranks)
        owners = tuple(owner * self.data_ranks + replica for owner in self.spec.placement)
        return Neighbours(owners, tuple(stage * self.data_ranks + each for each in range(self.data_ranks)))

    def peer(self, rank, message):
        """Returns the rank at the other end of a SEND or RECV of ``rank``."""
        return self.spec.peer(message) * self.data_ranks + rank % self.data_ranks

    def of_link(self, rank, message):
        """Returns the actions of ``rank`` of the kind and link of a message."""
        own = [each for each in self.actions(rank) if each.kind is message.kind]
        return [each for each in own if self.peer(rank, each) == self.peer(rank, message)]

    def advance(self, rank):
        """Lets ``rank`` execute what it can. Returns whether that was anything."""
        begin = self.rows[rank]
        while self.rows[rank] < len(self.actions(rank)) and (rank, self.rows[rank]) != self.stopped:
            action = self.actions(rank)[self.rows[rank]]
            if self.doing(rank, action):
                break
            if action.kind in SENDS | RECEIVES:
                self.did[rank][action.kind, self.peer(rank, action)] += 1
            elif action.kind in COLLECTIVES:
                self.did[rank][action] += 1
            self.rows[rank] += 1
        return self.rows[rank] > begin

    def doing(self, rank, action):
        """Returns what ``rank`` does while it waits in ``action``; "" if it need not wait."""
        if action.kind in (Kind.FORWARD, Kind.BACKWARD) and self.spec.receives_input(action):
            before = self.actions(rank)[self.rows[rank] - 1]
            beside = [before._replace(kind=Kind.FORWARD)] if before.kind is Kind.START_FORWARD else []
            for post in map(receive_of, [action, *beside]):
                peer, kind = self.peer(rank, post), send_matching(post).kind
                number = self.of_link(rank, post).index(post) + 1
                lost = self.lost is not None and self.lost[:3] == (peer, kind, rank) and self.lost[3] <= number
                if self.did[peer][kind, rank] < number or lost:
                    return "activation" if action.kind is Kind.FORWARD else "gradient"
        if action.kind in SENDS:
            peer = self.peer(rank, action)
            posted = self.did[peer][receive_matching(action).kind, rank]
            if self.did[rank][action.kind, peer] + 1 - SENDS_IN_FLIGHT > posted:
                return "send"
        if action.kind in WAITS and awaited_by(action).kind in COLLECTIVES:
            launch = awaited_by(action)
            if any(self.did[peer][launch] < self.did[rank][launch] for peer in self.neighbours(rank).alike):
                return action.kind.value
        return ""

    def standings(self, seconds=SECONDS):
        """Where all ranks stand. Those that are done with the batch are outside of it."""
        made = {}
        for rank, row in enumerate(self.rows):
            actions = self.actions(rank)
            over = row == len(actions)
            doing = "" if over else self.doing(rank, actions[row])
            stands = self.stopped is not None and self.stopped[0] == rank
            waits = () if over or stands or not doing else waits_in(actions, row, doing, self.neighbours(rank))
            place = "outside of a batch" if over else f"in {actions[row]}"
            done = done_before(actions, row, self.neighbours(rank).owners)
            made[rank] = Standing(rank, place, 7, "step 7", row, not over, seconds, LIMIT, waits, done)
        return made


@st.composite
def jobs(draw):
    return draw(program_specs(max_ranks=4, max_chunks_per_rank=3, max_micro_batches=5)), draw(st.integers(1, 3))


@settings(max_examples=150)
@given(jobs(), st.data())
def test_whoever_waits_names_the_rank_that_stands_still(job, data):
    spec, data_ranks = job
    rank = data.draw(st.integers(0, spec.pipeline_ranks * data_ranks - 1))
    row = data.draw(st.integers(0, len(build_program(spec)[rank // data_ranks]) - 1))
    ranks = Ranks(spec, data_ranks, stopped=(rank, row))
    standings = ranks.standings()
    waiting = [standing for standing in standings.values() if standing.waits]
    assert all(standing.waits for each, standing in standings.items() if standing.inside and each != rank)
    for victim in waiting:
        stall = find(victim, standings, {})
        assert (stall.cause, stall.culprits, stall.is_judged) == (Cause.WORK, (rank,), True), stall.sentence
        assert stall.sentence.startswith(f"rank {victim.rank} has waited 40 s {victim.place} of step 7 for ")
        assert f"rank {rank} stands in {ranks.actions(rank)[row]} for 40 s and waits for no rank" in stall.sentence
        answering = {each: standing for each, standing in standings.items() if each != rank}
        stall = find(victim, answering, {rank: Silent("does not answer since 12:03:05", 9.0)})
        assert (stall.cause, stall.culprits, stall.seconds) == (Cause.SILENCE, (rank,), 9.0), stall.sentence
        assert stall.sentence.endswith(f"rank {rank} does not answer since 12:03:05")


@settings(max_examples=100)
@given(jobs(), st.data())
def test_whoever_waits_names_the_link_that_lost_a_message(job, data):
    spec, data_ranks = job
    whole = Ranks(spec, data_ranks)
    sends = [
        (rank, send.kind, whole.peer(rank, send), whole.of_link(rank, send).index(send) + 1)
        for rank in range(whole.world)
        for send in whole.actions(rank)
        if send.kind in SENDS
    ]
    assume(sends)
    sender, kind, receiver, number = data.draw(st.sampled_from(sends))
    ranks = Ranks(spec, data_ranks, lost=(sender, kind, receiver, number))
    standings = ranks.standings()
    assert standings[receiver].waits
    for victim in [standing for standing in standings.values() if standing.waits]:
        stall = find(victim, standings, {})
        assert (stall.cause, set(stall.culprits)) == (Cause.NETWORK, {sender, receiver}), stall.sentence
        assert f"the link between ranks {sender} and {receiver} is down" in stall.sentence


@settings(max_examples=60)
@given(jobs())
def test_where_nobody_stands_still_nobody_waits(job):
    standings = Ranks(*job).standings()
    assert not any(standing.inside or standing.waits for standing in standings.values())
    assert stalled_longest(standings, {}) is None


SPEC = ProgramSpec((0, 1, 0, 1), "layered", 4, 4, 3)


def test_the_sentence_follows_the_waits_of_the_program():
    ranks = Ranks(SPEC, 2, stopped=(3, 0))
    standings = ranks.standings()
    silent = {3: Silent("does not answer since 12:03:05", 35.0)}
    del standings[3]
    assert find(standings[0], standings, silent).sentence == (
        "rank 0 has waited 40 s in F2.0 of step 7 for the activation that rank 2 sends after F1.0; "
        "rank 2 stands in WAIT_GATHER1, waiting for GATHER1 with ranks 2, 3; rank 3 does not answer since 12:03:05"
    )


def moved(standings, rank, seconds):
    return {**standings, rank: standings[rank]._replace(seconds=seconds)}


def test_a_rank_that_moves_anywhere_on_the_way_resets_the_clock():
    standings = Ranks(SPEC, 2, stopped=(3, 0)).standings(seconds=200.0)
    assert find(standings[0], standings, {}).seconds == 200
    for rank in (2, 3):
        assert find(standings[0], moved(standings, rank, 1.0), {}).seconds == 1
    # Nobody waits for this one.
    assert find(standings[0], moved(standings, 1, 1.0), {}).seconds == 200


def outside(rank, seconds, *waits):
    return Standing(rank, "outside of a batch", 7, "step 7", 20, False, seconds, LIMIT, waits)


def test_outside_of_batches_only_a_rank_that_does_not_answer_is_to_blame():
    barrier = Wait((0, 1, 2), "barrier with ranks 0, 1, 2", "barrier")
    standings = {0: outside(0, 300.0, barrier), 1: outside(1, 300.0, barrier), 2: outside(2, 300.0)}
    assert stalled_longest(standings, {}) is None
    del standings[2]
    stall = stalled_longest(standings, {2: Silent("does not answer since 12:03:05", 290.0)})
    assert stall.culprits == (2,) and stall.seconds == 290 and stall.limit == LIMIT


def test_a_rank_that_left_the_loop_is_to_blame_once_others_wait_in_the_next_batch():
    agreement = Wait((0, 1), "all_reduce with ranks 0, 1", "all_reduce")
    waiting = Standing(0, "where it reads the data", 8, "step 8", -1, True, 40.0, LIMIT, (agreement,))
    stall = stalled_longest({0: waiting, 1: outside(1, 50.0)}, {})
    assert stall.culprits == (1,) and stall.cause is Cause.WORK
    assert stall.sentence == (
        "rank 0 has waited 40 s where it reads the data of step 8 for all_reduce with ranks 0, 1; "
        "rank 1 stands outside of a batch after step 7 for 50 s and waits for no rank"
    )


def test_a_collective_in_which_all_take_part_blames_the_network():
    call = Wait((0, 1, 2), "all_reduce with ranks 0, 1, 2", "all_reduce")
    standings = {rank: Standing(rank, "in STEP", 7, "step 7", 9, True, 40.0, LIMIT, (call,)) for rank in range(3)}
    stall = stalled_longest(standings, {})
    assert stall.cause is Cause.NETWORK and set(stall.culprits) == {0, 1, 2}
    assert stall.sentence.endswith("so the network or a device between ranks 0, 1, 2 is down")


def test_ranks_that_wait_for_each_other_are_all_named():
    calls = [Wait((0, 1), f"{name} with ranks 0, 1", name) for name in ("all_reduce", "broadcast")]
    standings = {
        rank: Standing(rank, "in STEP", 7, "step 7", 9, True, 40.0, LIMIT, (call,)) for rank, call in enumerate(calls)
    }
    stall = stalled_longest(standings, {})
    assert stall.cause is Cause.CIRCLE and set(stall.culprits) == {0, 1}
    assert stall.sentence.endswith("so ranks 0, 1 wait for each other")


def waiting_outside(*names, blocks=True):
    """Returns the standings of ranks that wait outside of batches in calls of torch.distributed, by their names. Their
    programs differ in length."""
    ranks = tuple(range(len(names)))
    calls = [Wait(ranks, f"{name} with ranks {listed(ranks)}", name, blocks=blocks) for name in names]
    return {
        rank: outside(rank, 40.0)._replace(row=20 - 3 * (rank % 2), waits=(calls[rank],), stack=f"in {names[rank]}\n")
        for rank in ranks
    }


@given(st.integers(2, 16), st.data())
def test_ranks_that_save_alone_are_named_though_all_wait_outside_of_batches(ranks, data):
    """Such as rank 0, or the first rank of every node."""
    savers = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=(ranks - 1) // 2 or 1))
    names = ["all_gather_object" if rank in savers else "barrier" for rank in range(ranks)]
    stall = stalled_longest(waiting_outside(*names), {})
    assert stall.cause is Cause.CIRCLE and savers & set(stall.culprits) and stall.is_judged
    assert "all_gather_object with ranks 0, 1" in stall.sentence and "barrier with ranks 0, 1" in stall.sentence
    if 2 * len(savers) < ranks:
        assert all(f"  rank {rank}:\nin all_gather_object\n" in stall.stack for rank in savers & set(stall.culprits))
        assert "in barrier" not in stall.stack


def test_a_rank_that_saves_alone_is_to_blame_where_the_others_have_gone_on():
    """There is no barrier: rank 1 waits in the next batch."""
    agreement = Wait((0, 1), "all_reduce with ranks 0, 1", "all_reduce", blocks=True)
    further = Standing(1, "where it reads the data", 8, "step 8", 20, True, 40.0, LIMIT, (agreement,))
    for victim in (0, 1):
        standings = {**waiting_outside("all_gather_object", "barrier"), 1: further}
        stall = find(standings[victim], standings, {})
        assert stall.cause is Cause.CIRCLE and stall.is_judged
        assert "in all_gather_object" in stall.stack


def test_a_rank_that_has_left_the_batch_is_not_behind_one_inside():
    call = Wait((0, 1), "all_reduce with ranks 0, 1", "all_reduce", blocks=True)
    inside = Standing(0, "in STEP", 7, "step 7", 25, True, 40.0, LIMIT, (call,))
    assert find(inside, {0: inside, 1: outside(1, 40.0)}, {}).cause is Cause.NETWORK


def test_a_call_that_some_ranks_leave_early_may_only_be_slow():
    assert stalled_longest(waiting_outside("broadcast", "barrier", blocks=False), {}) is None


def test_a_rank_that_is_at_work_outside_of_batches_may_let_all_others_wait():
    standings = waiting_outside("all_gather_object", "barrier", "evaluate")
    assert stalled_longest({**standings, 2: outside(2, 40.0)}, {}) is None


def test_only_ranks_that_wait_for_each_other_are_blamed_for_it():
    """Rank 0 waits for two circles, and nobody for rank 0."""
    standings = waiting_outside("barrier", *("all_reduce", "all_gather") * 2)
    inner = {rank: standings[rank].waits[0]._replace(ranks=(1, 2, 3, 4)) for rank in range(1, 5)}
    standings |= {rank: standings[rank]._replace(waits=(wait,)) for rank, wait in inner.items()}
    stall = find(standings[0], standings, {})
    assert stall.cause is Cause.CIRCLE and 0 not in stall.culprits and stall.is_judged


def test_a_long_chain_is_cut_short():
    standings = {
        rank: Standing(rank, "in F1.0", 7, "step 7", 9, True, 40.0, LIMIT, waits)
        for rank in range(20)
        for waits in [(Wait((rank + 1,), f"rank {rank + 1}", "SEND_F", 1),) if rank < 19 else ()]
    }
    sentence = find(standings[0], standings, {}).sentence
    assert "rank 0 " in sentence and "15 more ranks wait between them" in sentence
    assert "rank 19 stands" in sentence and "rank 9" not in sentence


def test_a_silent_hub_is_to_blame_if_nobody_else_can_be_asked():
    own = Ranks(SPEC, 2, stopped=(3, 6)).standings()[2]
    stall = without_hub(own, 0, Silent("does not answer since 12:03:05", 30.0))
    assert stall.culprits == (0,) and stall.seconds == 30
    assert stall.sentence.endswith("rank 0, which would know why, does not answer since 12:03:05")


@settings(max_examples=30)
@given(jobs(), st.data())
def test_a_standing_travels_as_a_line(job, data):
    spec, data_ranks = job
    rank = data.draw(st.integers(0, spec.pipeline_ranks * data_ranks - 1))
    standings = Ranks(spec, data_ranks, stopped=(rank, 0)).standings()
    for standing in standings.values():
        standing = standing._replace(stack='File "train.py", line 3\n  loss()\n')
        line = standing.to_line()
        assert "\n" not in line and Standing.from_line(line) == standing


def test_a_rank_that_computes_waits_for_nobody():
    program = [Action(Kind.FORWARD, 0, 0)]
    assert waits_in(program, 0, "forward", Neighbours((0, 1), (0,))) == ()


def test_the_first_of_two_forwards_beside_each_other_waits_for_the_inputs_of_both():
    spec = ProgramSpec((0, 1, 0), "layered", 2, 2, 0, overlaps_exchanges=True)
    stopped = 0, build_program(spec)[0].index(Action(Kind.FORWARD, 0, 1, recomputed=True))
    standings = Ranks(spec, 1, stopped).standings()
    assert standings[1].place == "in F1.0"
    stall = find(standings[1], standings, {})
    assert (stall.cause, stall.culprits) == (Cause.WORK, (0,))
    assert "for the activation that rank 0 sends after F0.0 and for the activation that rank 0 sends after F0.1" in (
        stall.sentence
    )


def test_a_sender_waits_until_all_but_the_last_two_messages_may_be_taken():
    program = [Action(Kind.SEND_FORWARD, 0, micro_batch) for micro_batch in range(5)]
    neighbours = Neighbours(owners=(0, 1), alike=(0,))
    (wait,) = waits_in(program, 4, "send", neighbours)
    assert (wait.what, wait.times) == ("RECV_F 0", 3) and wait.ranks == (1,)
    # At the end of the batch, until all may be.
    (wait,) = waits_in(program, 5, "send", neighbours)
    assert (wait.what, wait.times) == ("RECV_F 0", 5)
