"""Which node of a cluster file would have which ranks, and what every kind of link would carry: as data and as text."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ds_lgamp.cost.assignment import Assignment, Demand, LinkKind
from ds_lgamp.integrations.deepspeed.explain.text import table, with_bytes


class LaidOut(NamedTuple):
    """The chosen order, and why."""

    cluster: str
    islands: Sequence[str]
    demand: Demand
    knows_messages: bool
    """Whether the bytes between pipeline ranks are known. Unknown ones count as none."""
    assignment: Assignment
    others: Sequence[Assignment]
    """In orders that were not chosen."""
    network_seconds: float
    """Of a step on the clock, if compute took no time."""
    step_seconds: float | None
    """Of a step on the clock; None if the time of compute is unknown."""
    exposed_seconds: float | None
    """Of the network that no compute hides."""


def assigned_json(laid_out: LaidOut) -> dict[str, Any]:
    """Returns it for a program to read."""
    assignment = laid_out.assignment
    return {
        "cluster": laid_out.cluster,
        "order": assignment.order,
        "slots": [
            {"rank": rank, "island": laid_out.islands[slot.island], "node": slot.node, "gpu": slot.gpu}
            for rank, slot in enumerate(assignment.slots)
        ],
        "pipeline_speeds": assignment.pipeline_speeds,
        "data_speeds": assignment.data_speeds,
        "data_group_links": assignment.data_group_kinds,
        "hop_links": assignment.hop_kinds,
        "bytes_sent": dict(assignment.bytes_sent),
        "seconds": dict(assignment.seconds),
        "knows_messages": laid_out.knows_messages,
        "network_seconds": laid_out.network_seconds,
        "step_seconds": laid_out.step_seconds,
        "exposed_seconds": laid_out.exposed_seconds,
        "other_orders": [{"order": other.order, "seconds": seconds_of(other)} for other in laid_out.others],
    }


def seconds_of(assignment: Assignment) -> float:
    """Returns the seconds of the messages of a step."""
    return sum(assignment.seconds.values())


_KINDS_OF_LINKS: dict[LinkKind, str] = {
    "node": "inside nodes",
    "island": "inside islands",
    "between": "between islands",
}


def assigned_text(laid_out: LaidOut) -> str:
    """Returns tables and sentences."""
    parts = (_nodes, _groups, _links, _orders)
    return "\n\n".join(part(laid_out) for part in parts)


def _nodes(laid_out: LaidOut) -> str:
    assignment, width = laid_out.assignment, laid_out.demand.data_ranks * laid_out.demand.tensor_ranks
    on_node: dict[tuple[int, str], list[int]] = {}
    for slot, rank in sorted(assignment.rank_of.items(), key=lambda item: (item[0].island, item[1])):
        on_node.setdefault((slot.island, slot.node), []).append(rank)
    rows = [
        [
            laid_out.islands[island],
            node,
            assignment.inside[island].network,
            f"{assignment.gpu_speeds[ranks[0]]:g}",
            _ranges(ranks),
            _ranges(sorted({rank // width for rank in ranks})),
            _ranges(sorted({rank % width // laid_out.demand.tensor_ranks for rank in ranks})),
        ]
        for (island, node), ranks in on_node.items()
    ]
    titles = ["island", "node", "network", "speed", "ranks", "pipeline ranks", "data-parallel ranks"]
    return f"Ranks on {laid_out.cluster}: {assignment.order}\n" + table(titles, rows, left={0, 1, 2, 4, 5, 6})


def _groups(laid_out: LaidOut) -> str:
    assignment = laid_out.assignment
    rows = [
        [rank, f"{speed:g}", _KINDS_OF_LINKS[group], _KINDS_OF_LINKS[hop] if assignment.pipeline_ranks > 1 else "none"]
        for rank, (speed, group, hop) in enumerate(
            zip(assignment.pipeline_speeds, assignment.data_group_kinds, assignment.hop_kinds)
        )
    ]
    return table(["pipeline rank", "speed", "data-parallel groups", "messages to the next"], rows, left={2, 3})


def _links(laid_out: LaidOut) -> str:
    rows = [
        [_KINDS_OF_LINKS[kind], with_bytes(sent), f"{laid_out.assignment.seconds[kind]:.3g}"]
        for kind, sent in laid_out.assignment.bytes_sent.items()
    ]
    text = "Each step, all ranks\n" + table(["links", "carry", "busiest, s"], rows, left={0})
    sentences = [f"On the clock, a step takes {laid_out.network_seconds:.3g} s if compute takes no time."]
    if laid_out.exposed_seconds is None:
        sentences.append("How much of it compute hides is unknown: that takes activations and the cluster's peak.")
    else:
        step, bare = laid_out.step_seconds, laid_out.exposed_seconds
        sentences.append(f"With compute it takes {step:.3g} s, of which {bare:.3g} s of the network are exposed.")
    if not laid_out.knows_messages:
        sentences.append("Bytes between pipeline ranks are unknown, because activations are; they count as none.")
    return "\n".join([text, *sentences])


def _orders(laid_out: LaidOut) -> str:
    rows = [[f"{seconds_of(each):.3g}", each.order] for each in (laid_out.assignment, *laid_out.others)]
    return "Orders, and the seconds of their messages in a step; the first one is taken\n" + table(
        ["seconds", "order"], rows, left={1}
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Returns ascending ``numbers`` as a person writes them: 0-3, 8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
