"""Residency: which chunks hold their full weights while a pipeline rank computes, and when they are gathered."""

from collections.abc import Iterable, Sequence

from ds_lgamp.schedule.actions import Action

PREFETCHED_CHUNKS = 2
"""How many chunks deferred gathers cover at stages 1 and 2: the chunk that computes and the next one. Both stages keep
all weights."""


def chunk_visits(computes: Iterable[Action]) -> list[int]:
    """Returns the chunks in the order of their visits. A visit is a run of computes on one chunk."""
    visits: list[int] = []
    for action in computes:
        if not visits or visits[-1] != action.chunk:
            visits.append(action.chunk)
    return visits


def current_chunks(visits: Sequence[int], zero_stage: int, defers_gathers: bool) -> list[int]:
    """Returns the chunks whose gathers have started before the first visit, in order of need.

    At stages 1 and 2 the previous step starts the gathers of all chunks, unless gathers are deferred.
    """
    return list(dict.fromkeys(visits)) if zero_stage in (1, 2) and not defers_gathers else []


def resident_windows(
    visits: Sequence[int], zero_stage: int, resident_chunks: int, defers_gathers: bool
) -> list[list[int]]:
    """Returns, for each visit, the chunks whose gathers must have started when it begins, in order of need.

    Stage 3 holds the next ``resident_chunks`` distinct chunks. With two or more, a gather overlaps the compute of the
    chunk before it, and the turn drops no chunk that is still needed. With N chunks on the rank, the layered order in K
    groups takes K(2N - 2B) + B gathers for B < N resident chunks, else N.

    Stages 1 and 2 gather every chunk once, either behind the step or deferred to one visit ahead. Stage 0 gathers
    nothing.
    """
    if zero_stage == 0:
        return [[] for _ in visits]
    current = current_chunks(visits, zero_stage, defers_gathers)
    if current:
        return [current for _ in visits]
    resident_chunks = min(resident_chunks, len(set(visits)))
    if zero_stage == 3:
        return [_next_distinct(visits, start, resident_chunks) for start in range(len(visits))]
    gathered: list[int] = []
    windows = []
    for start in range(len(visits)):
        upcoming = _next_distinct(visits, start, min(PREFETCHED_CHUNKS, len(set(visits))))
        gathered.extend(chunk for chunk in upcoming if chunk not in gathered)
        windows.append(list(gathered))
    return windows


def _next_distinct(visits: Sequence[int], start: int, count: int) -> list[int]:
    upcoming: list[int] = []
    for position in range(start, len(visits)):
        if visits[position] not in upcoming:
            upcoming.append(visits[position])
            if len(upcoming) == count:
                break
    return upcoming
