"""Which ranks of a recording work together: on messages, and in collectives."""

from collections import defaultdict
from collections.abc import Sequence

from ds_lgamp.schedule.actions import BETWEEN_NODES, Kind
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.view.recording import RankRecording


class Peers:
    """Ranks are numbered by their place in ``ranks``.

    Tensor-parallel ranks share their pipeline rank and their data-parallel rank. They are told apart by their order.
    """

    def __init__(self, spec: ProgramSpec, ranks: Sequence[RankRecording]) -> None:
        self._hierarchy = spec.hierarchy
        self._ranks = ranks
        self._alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.tensor_ranks: list[int] = []
        """Of every rank, which of those with both its numbers it is."""
        for number, rank in enumerate(ranks):
            alike = self._alike[rank.pipeline_rank, rank.data_rank]
            self.tensor_ranks.append(len(alike))
            alike.append(number)

    def at(self, pipeline_rank: int, rank: int) -> int | None:
        """Returns the rank of another pipeline rank with which ``rank`` exchanges messages; None if it is missing."""
        alike, place = self._alike.get((pipeline_rank, self._ranks[rank].data_rank), ()), self.tensor_ranks[rank]
        return alike[place] if place < len(alike) else None

    def group(self, rank: int, kind: Kind) -> tuple[int, int, int]:
        """Returns what the ranks have in common that run a collective of this kind with ``rank``, and no others."""
        data_rank, part = self._ranks[rank].data_rank, 0
        if self._hierarchy is not None:
            node, place = divmod(data_rank, self._hierarchy.node_ranks)
            part = place if kind in BETWEEN_NODES else node
        return self._ranks[rank].pipeline_rank, self.tensor_ranks[rank], part
