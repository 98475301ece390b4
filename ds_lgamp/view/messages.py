"""When the messages of a recorded step arrived."""

from collections.abc import Sequence

from ds_lgamp.schedule.actions import SENDS, Action, Kind, receive_matching
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.view.critical_path import action_of
from ds_lgamp.view.peers import Peers
from ds_lgamp.view.recording import Interval, RankRecording, Step

_USES = {Kind.RECV_FORWARD: Kind.FORWARD, Kind.RECV_BACKWARD: Kind.BACKWARD}


def with_arrivals(spec: ProgramSpec, ranks: Sequence[RankRecording], steps: Sequence[Step]) -> list[Step]:
    """Returns the steps with sends that end when the compute that uses their message begins, if that is earlier.

    A rank learns that a send is over when it looks, which may be much later.
    """
    peers = Peers(spec, ranks)
    begun: dict[tuple[int | None, str], float] = {}
    for rank, step in enumerate(steps):
        for each in step.intervals:
            if each.lane == "compute":
                # A backward that recomputes has two intervals. The second uses the gradient.
                begun[rank, each.name] = each.start

    def arrived(rank: int, each: Interval) -> Interval:
        send = action_of(each.name) if each.lane == "send" else None
        if send is None or send.kind not in SENDS:
            return each
        receive = receive_matching(send)
        use = Action(_USES[receive.kind], receive.chunk, receive.micro_batch)
        start = begun.get((peers.at(spec.placement[use.chunk], rank), str(use)), each.end)
        return each._replace(end=min(each.end, max(each.start, start)))

    return [
        step._replace(intervals=[arrived(rank, each) for each in step.intervals]) for rank, step in enumerate(steps)
    ]


def micro_batches_of(step: Step) -> int:
    """Returns how many micro-batches a step has. Data-parallel ranks of different speeds have different numbers."""
    computes = (action_of(each.name) for each in step.intervals if each.lane == "compute")
    return max((action.micro_batch + 1 for action in computes if action is not None), default=0)
