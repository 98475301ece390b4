"""Residency: which chunks hold their full weights while a pipeline rank computes, and when they are gathered."""

from collections.abc import Iterable, Sequence

from ds_lgamp.schedule.actions import Action


def chunk_visits(computes: Iterable[Action]) -> list[int]:
    """Returns the chunks in the order of their visits. A visit is a run of computes on one chunk."""
    visits: list[int] = []
    for action in computes:
        if not visits or visits[-1] != action.chunk:
            visits.append(action.chunk)
    return visits


def updated_windows(visits: Sequence[int], ahead: int, defers_gathers: bool) -> list[list[int]]:
    """Returns, for each visit, the chunks whose updated weights must be under way when it begins, in order of need.

    Every chunk is gathered once: behind the step, so that all are under way at the first visit, or deferred. Deferred
    gathers cover the chunk that computes and the ``ahead`` next ones.
    """
    if not defers_gathers:
        everything = list(dict.fromkeys(visits))
        return [everything for _ in visits]
    gathered: list[int] = []
    windows = []
    for upcoming in next_distinct(visits, 1 + ahead):
        gathered.extend(chunk for chunk in upcoming if chunk not in gathered)
        windows.append(list(gathered))
    return windows


def next_distinct(visits: Sequence[int], count: int) -> list[list[int]]:
    """Returns, for each visit, the first ``count`` different chunks from there on; fewer if there are no more.

    At stage 3 these are the resident chunks. With two or more, a gather overlaps the compute of the chunk before it,
    and the turn drops no chunk that is still needed. With N chunks on the rank, the layered order in K groups takes
    K(2N - 2B) + B gathers for B < N resident chunks, else N.
    """
    windows: list[list[int]] = []
    upcoming: list[int] = []
    for chunk in reversed(visits):
        upcoming = [chunk, *(other for other in upcoming if other != chunk)][:count]
        windows.append(upcoming)
    return windows[::-1]
