"""How long a step takes if all chunks, links and ranks are alike: formulas in place of the clock.

A planner ranks thousands of candidates with them and then simulates the best ones.

Symbols: P pipeline ranks, N chunks per rank, M micro-batches of a group, B resident chunks; f, b, h, m, g, r: forward,
backward with recomputation, hop, message, gather and reduction of one chunk; t = f + b.

For each group of micro-batches, rank 0 makes N - 1 forward visits to its chunks, the turn, and N - 1 backward visits.
The other ranks do the same, each a little later than the one before in forward, and earlier in backward.

- Two forward visits begin M f apart while the rank computes without a pause, and P (f + h) apart while it waits for its
  first micro-batch to come round the ring. Backward visits alike.
- The turn is a pipeline with one chunk per rank. It takes (P - 1)(t + 2h) + M t, or more (:func:`_turn`).
- Interleaved 1F1B makes visits with P micro-batches each. The forwards and backwards in between belong to its turn.

Without hops and collectives this makes

- t [(N - 1) max(M, P) + M + P - 1] for layered,
- t (N M + P - 1) for interleaved 1F1B, where M is a multiple of P, as in arXiv 2104.04473, section 2.2.

Collectives follow one another beside the visits of rank 0, where residency and waits place them (:class:`_FirstRank`).
No other rank waits longer for its collectives, because rank 0 is the first to begin and the last to end.
"""

from typing import NamedTuple

from ds_lgamp.schedule.costs import Durations
from ds_lgamp.schedule.orders import micro_batch_groups

_RUN_GROUPS = 5
"""With more groups than this, each of those in the middle takes as long as the third."""


class Shape(NamedTuple):
    """What ``ProgramSpec`` says, for ranks with equally many chunks on the schedule's default placement."""

    schedule: str
    pipeline_ranks: int
    chunks_per_rank: int
    micro_batches: int
    zero_stage: int = 0
    resident_chunks: int = 2
    micro_batch_group: int | None = None
    """Layered only; None for all micro-batches."""


def step_time(shape: Shape, durations: Durations) -> float:
    """Returns how long a step of ``shape`` takes, in the unit of ``durations``.

    The caller knows that a program of such a ``shape`` is possible. Messages and collectives have a card each.

    If h <= t/2 and m <= min(f, b), the result equals that of the clock for

    - gpipe and layered, at any stage; with groups at stages 0 and 1;
    - 1F1B without recomputation;
    - interleaved 1F1B without recomputation, where B >= N or the stage is below 3.

    With longer hops, and messages up to a hop, layered, 1F1B and gpipe at stage 0 take at least 0.75 and at most 1.1
    times as long as on the clock. tests/schedule/test_closed_form.py compares both, and says how far off the result is
    elsewhere.

    Raises ValueError for durations of loads or stores: offloading takes the clock.
    """
    if durations.load or durations.store:
        raise ValueError(
            f"load is {durations.load:g} and store {durations.store:g}, but the closed form knows no offloading; "
            "use the clock"
        )
    group = shape.micro_batch_group or shape.micro_batches
    sizes = [len(members) for members in micro_batch_groups(shape.micro_batches, group)]
    skipped = max(0, len(sizes) - _RUN_GROUPS)
    rank = _FirstRank(shape, durations)
    for index, size in enumerate(sizes[skipped:]):
        before = rank.now
        rank.run(_phases(shape, durations, size), is_last=skipped + index == len(sizes) - 1)
        if index == _RUN_GROUPS - 3:
            rank.shift(skipped * (rank.now - before))
    return rank.end() + shape.chunks_per_rank * durations.update


class _Phases(NamedTuple):
    """How long rank 0 takes for one group of micro-batches, without collectives."""

    forward: float
    """The compute of a forward visit."""
    forward_pace: float
    """From the beginning of a forward visit to that of the next one, at least."""
    first_backward: float
    """From the beginning of the turn to the first backward."""
    turn: float
    """From the beginning of the turn to its end."""
    backward: float
    """The compute of a backward visit."""
    backward_pace: float
    """From the end of a backward visit to that of the next one, at least."""


def _phases(shape: Shape, durations: Durations, micro_batches: int) -> _Phases:
    ranks, chunks = shape.pipeline_ranks, shape.chunks_per_rank
    forward, hop, message = durations.forward, durations.hop, durations.message
    if ranks == 1:
        hop = message = 0.0
    at_turn = durations.backward
    """The backward of a last chunk that turns at once."""
    backward = at_turn + durations.recompute
    both = forward + backward
    fill = (ranks - 1) * (both + 2 * hop)
    interleaves = shape.schedule == "interleaved_1f1b"
    # Each forward and each backward sends a message. Messages that take longer than computes set the pace.
    if shape.schedule == "gpipe" or (interleaves and micro_batches == ranks):
        turn = fill + both + (micro_batches - 1) * (max(forward, message) + max(backward, message))
        if micro_batches == 1:
            turn -= durations.recompute
    else:
        turn = _turn(shape, micro_batches, durations._replace(backward=backward, hop=hop, message=message), at_turn)
    visit = ranks if interleaves else micro_batches
    if interleaves:
        steady = both + max(0.0, hop - min(forward, backward), 2 * message - both)
        turn += (chunks - 1) * (micro_batches - ranks) * steady + _gathers_in_turn(shape, durations)
    return _Phases(
        forward=visit * forward,
        forward_pace=max(visit * forward, visit * message, ranks * (forward + hop)),
        first_backward=fill - backward - hop + forward + at_turn if ranks > 1 else forward,
        turn=turn,
        backward=visit * backward,
        backward_pace=max(visit * backward, visit * message, ranks * (backward + hop)),
    )


def _turn(shape: Shape, micro_batches: int, durations: Durations, at_turn: float) -> float:
    """Returns how long one chunk per rank takes for the forwards and backwards of all micro-batches.

    Backwards of ``durations`` include recomputation. The rank that is k-th from the last warms up with k forwards under
    1F1B, with 2 k under the layered schedule, and then alternates. The result is the longest of these ways through the
    pipeline:

    - All micro-batches compute on the last rank, whose backward takes ``at_turn``, or its messages leave.
    - All compute on the k-th rank from the last, which also waits for its first backward and for its last one.
    - The k-th rank waits for a backward once in every w micro-batches, one more than its warm-up has. Under 1F1B,
      hops make it wait. The warm-up of a layered rank is long enough if h <= t/2.
    - All messages of the k-th rank leave, two for each micro-batch (:func:`_messages_leave`).
    - Under 1F1B, the way waits at several ranks (:func:`_zigzag`).
    """
    ranks, warm_up = shape.pipeline_ranks, 1 if shape.schedule == "1f1b" else 2
    forward, backward, hop, message = durations.forward, durations.backward, durations.hop, durations.message
    both = forward + backward
    at_last = max(micro_batches * (forward + at_turn), forward + at_turn + (micro_batches - 1) * message)
    longest = (ranks - 1) * (both + 2 * hop) + at_last
    # If no rank waits for hops in between, the rank before the last waits longest for its first and its last backward.
    for distance in range(1, ranks if 2 * hop > both else min(ranks, 2)):
        away = 2 * hop + forward + at_turn + (distance - 1) * (both + 2 * hop)
        trip, window = forward + away + backward, warm_up * distance + 1
        rounds, rest = divmod(micro_batches - 1, window)
        if rounds == 0:
            all_backwards = max(micro_batches * backward, away + backward)
            way = max(trip + rest * max(backward, forward + at_turn), micro_batches * forward + all_backwards)
        else:
            idle = max(0.0, forward + away - window * forward) + max(0.0, away - (window - 1) * backward)
            way = micro_batches * both + idle
            if trip > window * both:
                way = max(way, (rounds + 1) * trip + rest * both)
        # The first rank passes gradients on only if it has more chunks.
        if distance < ranks - 1 or shape.chunks_per_rank > 1:
            way = max(way, _messages_leave(micro_batches, min(window, micro_batches), trip, forward, message))
        longest = max(longest, way + (ranks - 1 - distance) * (both + 2 * hop))
    if warm_up == 1:
        # A way that often returns to the last rank wins back what is not recomputed there. This is an approximation.
        returns = max(min(micro_batches, 2), 1 + (micro_batches - 1) // ranks)
        longest = max(longest, _zigzag(ranks, micro_batches, both, hop) - returns * (backward - at_turn))
        if ranks > 2:
            longest = max(longest, _zigzag(ranks - 1, micro_batches, both, hop))
    return longest


def _messages_leave(micro_batches: int, first: int, trip: float, forward: float, message: float) -> float:
    """Returns how long a rank takes to send all results of forwards and backwards but the last, whose way is a hop.

    The ``first`` forwards leave at once, and the others when the first backward is there, after a ``trip``.
    """
    return max(forward + first * message, trip) + (2 * micro_batches - first - 1) * message


def _zigzag(ranks: int, micro_batches: int, both: float, hop: float) -> float:
    """Returns how long 1F1B takes on ``ranks`` equal ranks: (M + P - 1) t, and 2h for P - 1 of P micro-batches.

    The number of round trips was found by simulation, and the tests compare it with the clock.
    """
    round_trips = ranks + micro_batches - 3 - (micro_batches - 2) // ranks
    return (micro_batches + ranks - 1) * both + 2 * hop * round_trips


def _gathers_in_turn(shape: Shape, durations: Durations) -> float:
    """Returns how long interleaved 1F1B waits for gathers while it alternates between two chunks. An approximation.

    With one resident chunk each compute waits for its own gather, unless both are of the same chunk, which is so for
    one chunk in N if N is odd. With two or three, a gather that comes every P micro-batches is hidden by one compute
    only.
    """
    ranks, chunks, resident = shape.pipeline_ranks, shape.chunks_per_rank, shape.resident_chunks
    if shape.zero_stage < 3 or resident >= chunks or shape.micro_batches == ranks:
        return 0.0
    gather, backward = durations.gather, durations.backward + durations.recompute
    pairs = chunks * shape.micro_batches - (chunks - 1) * ranks - (ranks - 1)
    moved = (chunks - 1) / chunks if chunks % 2 else 1.0
    if resident == 1:
        return 2 * gather * pairs * moved
    exposed = [max(0.0, gather - backward), max(0.0, gather - durations.forward)]
    alone = {2: sum(exposed), 3: min(exposed)}.get(resident, 0.0)
    return pairs / ranks * moved * max(alone, 2 * gather - ranks * (durations.forward + backward))


class _FirstRank:
    """The visits of rank 0, and its collectives beside them, which run one after another.

    - Stage 3: the first visit launches B gathers, each later forward visit that of the chunk B - 1 later. The turn
      finds its chunks resident. A backward visit of chunk c launches the gather of chunk c - B + 1. The first B chunks
      stay for the next group.
    - Stages 1 and 2: all gathers are under way when the step begins. Deferred ones end as early as they are needed, or
      follow one another without a pause as well, so they expose as much.
    - A chunk's reduction begins when its last backward ends, at stages 2 and 3 in each group. A backward visit waits
      for that of its own chunk, and for the oldest while B are under way.
    """

    def __init__(self, shape: Shape, durations: Durations) -> None:
        stage, self.chunks = shape.zero_stage, shape.chunks_per_rank
        self.gather, self.reduce = durations.gather if stage else 0.0, durations.reduce
        self.resident = min(shape.resident_chunks, self.chunks)
        self.releases = stage == 3
        self.covered = self.resident if self.releases else self.chunks
        """How many chunks the gathers of a forward visit cover, its own included."""
        self.in_groups = shape.micro_batch_group is not None and shape.micro_batch_group < shape.micro_batches
        self.reduces_once = stage <= 1
        # Every first backward precedes every reduction if chunks alternate, or if gradients live through all groups.
        alternates = shape.schedule == "interleaved_1f1b" and shape.micro_batches > shape.pipeline_ranks
        never_full = stage == 0 or alternates or (self.in_groups and self.reduces_once)
        self.most_held = self.chunks + 1 if never_full else self.resident
        self.now = self.idle = 0.0
        """When the last visit ends, and when the last launched collective does."""
        self.gathered = [0.0] * self.chunks
        """When each chunk was or will be gathered."""
        self.launched = 0
        """How many chunks of the next forward visits are gathered, or their gathers launched."""
        self.reducing: list[tuple[int, float]] = []
        """The chunks of the reductions that nothing has awaited, and when they end, oldest first."""

    def run(self, phases: _Phases, is_last: bool) -> None:
        """Runs a group of micro-batches. ``is_last``: whether it is the last one of the step."""
        reduces = is_last or not self.reduces_once
        begin = -phases.forward_pace
        for chunk in range(self.chunks):
            while self.launched < min(chunk + self.covered, self.chunks):
                self.launch_gather(self.launched)
                self.launched += 1
            begin = max(self.now, begin + phases.forward_pace if chunk else 0.0, self.gathered[chunk])
            self.now = begin + phases.forward
        first_backward = begin + phases.first_backward
        self.now = begin + phases.turn + (self.can_accumulate(self.chunks - 1, first_backward) - first_backward)
        if reduces:
            self.launch_reduction(self.chunks - 1)
        pause = phases.backward_pace - phases.backward
        for chunk in range(self.chunks - 2, -1, -1):
            if self.releases and chunk >= self.resident - 1:
                self.launch_gather(chunk - self.resident + 1)
            begin = self.can_accumulate(chunk, max(self.now + pause, self.gathered[chunk]))
            self.now = begin + phases.backward
            if reduces:
                self.launch_reduction(chunk)
        if self.releases:
            self.launched = self.resident

    def launch_gather(self, chunk: int) -> None:
        self.gathered[chunk] = self.idle = max(self.idle, self.now) + self.gather

    def launch_reduction(self, chunk: int) -> None:
        self.idle = max(self.idle, self.now) + self.reduce
        self.reducing.append((chunk, self.idle))

    def can_accumulate(self, chunk: int, begin: float) -> float:
        """Returns when a chunk's first backward can run that could ``begin`` if no reduction were under way."""
        reducing = self.reducing
        while len(reducing) >= self.most_held or (self.in_groups and any(held == chunk for held, _ in reducing)):
            begin = max(begin, reducing.pop(0)[1])
        return begin

    def shift(self, time: float) -> None:
        """Moves everything by ``time``."""
        self.now += time
        self.idle += time
        self.gathered = [end + time for end in self.gathered]
        self.reducing = [(chunk, end + time) for chunk, end in self.reducing]

    def end(self) -> float:
        """Returns when STEP has awaited all reductions."""
        return max([self.now, *(end for _, end in self.reducing)])
