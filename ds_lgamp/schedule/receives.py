"""Decides when a pipeline rank posts its receives.

Two ways exist, because two kinds of transport exist.

- **Early.** gloo matches messages by tag and keeps no order between links. A rank posts receives well before their
  use, so that a sender never waits for permission.
- **On arrival.** NCCL runs every operation in order on a stream, and streams may share one hardware queue of the GPU.
  There, a receive whose message is not under way yet blocks everything that is queued after it, sends of the same rank
  included. So a rank posts a receive when the simulated clock says that its message has just been sent. All ranks then
  queue their operations in the order of one clock, and an operation waits only for operations that are earlier on that
  clock. So no cycle of waits can form, however streams share queues; :mod:`ds_lgamp.schedule.validate` proves it for
  each program.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from ds_lgamp.schedule.actions import Action, Kind, Segments, receive_of
from ds_lgamp.schedule.orders import first_turning_chunk
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import RECEIVES_POSTED, ProgramSpec


def receive_posts(spec: ProgramSpec, rank: int, segments: Segments) -> list[list[Action]]:
    """Returns, for each compute of ``rank``, the receives to post directly before it.

    Args:
        segments: its computes. All messages of a segment arrive in it.
    """
    if spec.receives_on_arrival:
        return _on_arrival(spec, rank, [action for segment in segments for action in segment])
    return [posts for segment in segments for posts in _early(spec, rank, segment)]


def _early(spec: ProgramSpec, rank: int, computes: Sequence[Action]) -> list[list[Action]]:
    """Posts receives of one kind in the order of their consumers.

    With a window of n receives, each is posted n - 1 computes of its kind before its consumer, but not before the
    window has room. Forwards and backwards may alternate in between, so a receive is posted at most 2(n - 1) computes
    of any kind earlier.
    """
    posts: list[list[Action]] = [[] for _ in computes]
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        alike = [index for index, action in enumerate(computes) if action.kind is kind]
        received = [order for order, index in enumerate(alike) if spec.receives_input(computes[index])]
        window = _window(spec, rank, kind)
        for position, order in enumerate(received):
            consumer, earliest = alike[order], order - (window - 1)
            early = alike[earliest] if earliest >= 0 else alike[0] + earliest
            room = alike[received[position - window]] + 1 if position >= window else 0
            posts[max(room, early, consumer - 2 * (window - 1))].append(receive_of(computes[consumer]))
    return posts


def _window(spec: ProgramSpec, rank: int, kind: Kind) -> int:
    """Returns how many receives of one kind ``rank`` keeps posted early.

    This is ``RECEIVES_POSTED`` unless messages pile up. While a group larger than the ring passes, they do so on the
    wrap-around link and where the turn begins.
    """
    forward = kind is Kind.FORWARD
    # Evaluation ignores groups: all micro-batches pass through a chunk together. It has no turn.
    group = spec.micro_batches if spec.forward_only else min(spec.micro_batch_group, spec.micro_batches)
    turn = spec.chunks if spec.forward_only else first_turning_chunk(spec.placement)
    if spec.returns_outputs and forward:
        group, turn = spec.pipeline_ranks, spec.chunks
    for chunk, owner in enumerate(spec.placement):
        source = chunk - 1 if forward else chunk + 1
        if owner == rank and 0 <= source < spec.chunks and spec.placement[source] != rank:
            wraps = spec.placement[source] > rank if forward else spec.placement[source] < rank
            if wraps or max(chunk, source) == turn:
                return max(RECEIVES_POSTED, group - spec.pipeline_ranks + 2)
    return RECEIVES_POSTED


def _on_arrival(spec: ProgramSpec, rank: int, computes: Sequence[Action]) -> list[list[Action]]:
    """Posts each receive before the first compute that starts on the clock once the message has been sent."""
    posts: list[list[Action]] = [[] for _ in computes]
    clock = _clock(spec)
    arrivals = []
    for compute in filter(spec.receives_input, computes):
        source = compute.chunk + (-1 if compute.kind is Kind.FORWARD else 1)
        arrivals.append(
            (clock.ends[compute.kind, source, compute.micro_batch], compute.kind is Kind.BACKWARD, receive_of(compute))
        )
    for arrival, _, receive in sorted(arrivals, key=itemgetter(0, 1)):
        posts[bisect_left(clock.starts[rank], arrival)].append(receive)
    return posts


class _Clock(NamedTuple):
    starts: list[list[float]]
    """When each compute of each rank starts, in the rank's order."""
    ends: dict[tuple[Kind, int, int], float]
    """When each compute ends, by kind, chunk and micro-batch."""


@lru_cache(maxsize=1)
def _clock(spec: ProgramSpec) -> _Clock:
    """Runs the computes and sends of all ranks on the clock. The programs of all ranks share the result."""
    program = [spec.computes(rank) for rank in range(spec.pipeline_ranks)]
    spans = simulate(spec, program, sends_at_once=True).spans
    starts = [[span.start for span in of_rank] for of_rank in spans]
    return _Clock(starts, {span.action[:3]: span.end for of_rank in spans for span in of_rank})
