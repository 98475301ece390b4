"""The compute order of a pipeline rank in closed form: what precedes a backward, without walking the program."""

from collections.abc import Iterator
from itertools import chain

from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.schedule.spec import SENDS_IN_FLIGHT


class Order:
    """The compute order of a rank in closed form: forwards ahead, then forwards and backwards in turn, then backwards.

    ``round`` micro-batches pass through one chunk after another, and then the next ones do. Chunks are numbered on the
    rank. See ``ds_lgamp/schedule/orders.py``.

    Args:
        micro_batches: of the order, which is one group of the layered schedule.
    """

    def __init__(self, configuration: Configuration, rank: int, micro_batches: int) -> None:
        ranks, self.chunks = configuration.pipeline_ranks, configuration.chunks_per_rank
        self.micro_batches = self.round = micro_batches
        self.total = micro_batches * self.chunks
        following = ranks - 1 - rank
        if configuration.schedule == "interleaved_1f1b":
            self.round = ranks
        if configuration.schedule == "1f1b":
            ahead = following
        elif configuration.schedule == "layered" or micro_batches > self.round:
            ahead = 2 * following + (self.chunks - 1) * self.round
        else:
            ahead = self.total
        self.ahead = min(ahead, self.total)

    def forwards(self, backwards: int) -> int:
        """Returns how many forwards precede the backward after ``backwards`` others."""
        return min(self.total, self.ahead + 1 + backwards)

    def forward_chunk(self, number: int) -> int:
        return number // self.round % self.chunks

    def backward_chunk(self, number: int) -> int:
        return self.chunks - 1 - self.forward_chunk(number)

    def forwards_of(self, chunk: int, forwards: int) -> int:
        """Returns how many of the first ``forwards`` belong to ``chunk``."""
        rounds, rest = divmod(forwards, self.round * self.chunks)
        return self.round * rounds + max(0, min(self.round, rest - chunk * self.round))

    def backwards_of(self, chunk: int, backwards: int) -> int:
        """Returns how many of the first ``backwards`` belong to ``chunk``."""
        return self.forwards_of(self.chunks - 1 - chunk, backwards)

    def turning_points(self) -> list[int]:
        """Returns the backwards, by their number, at which the rank may store most.

        While only backwards are left, these are the first ones of each visit. While forwards of other chunks take
        turns with them, stored inputs may also be most just before a visit ends, or forwards change to the next chunk.
        Two rounds show all that, and the last one has the reductions.
        """
        per_round = self.round * self.chunks
        if self.total == per_round:
            alternating = self.total - self.ahead
            points = {*range(0, self.total, self.round), min(SENDS_IN_FLIGHT, self.round - 1), alternating - 1}
            return sorted(point for point in points if point >= 0)
        rounds = (*range(0, 2 * per_round, self.round), *range(self.total - per_round, self.total, self.round))
        points = {start - early for start in rounds for early in (0, 1)}
        points |= {self.total - self.ahead - 1}
        points |= {
            forwards - self.ahead - early for forwards in range(0, 3 * per_round, self.round) for early in (0, 1)
        }
        return sorted(point for point in points if 0 <= point < self.total)

    def next_chunks(self, backwards: int, count: int, again: bool) -> list[int]:
        """Returns the next ``count`` distinct chunks from a backward on. ``again``: whether another group follows."""

        def visits() -> Iterator[int]:
            number = backwards
            while number < self.total:
                yield self.backward_chunk(number)
                forwards = self.ahead + 1 + number
                if forwards < self.total:
                    yield self.forward_chunk(forwards)
                steps = self.round - number % self.round
                number += min(steps, self.round - forwards % self.round) if forwards < self.total else steps

        distinct: list[int] = []
        for chunk in chain(visits(), range(self.chunks) if again else ()):
            if chunk not in distinct:
                distinct.append(chunk)
            if len(distinct) == count:
                break
        return distinct
