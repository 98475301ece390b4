"""Which chunks hold their full weights while a pipeline rank computes, and which they must be gathered for."""

from collections.abc import Iterable, Sequence

from ds_lgamp.schedule.actions import Action

PREFETCHED_CHUNKS = 2
"""Stages 1 and 2 keep all weights; where gathers are deferred, the chunk that computes and the one after it are
gathered."""


def chunk_visits(computes: Iterable[Action]) -> list[int]:
    """The chunks a compute order visits: one entry for every run of actions on the same chunk."""
    visits: list[int] = []
    for action in computes:
        if not visits or visits[-1] != action.chunk:
            visits.append(action.chunk)
    return visits


def current_chunks(visits: Sequence[int], zero_stage: int, defers_gathers: bool) -> list[int]:
    """The chunks whose gather has started before the first visit, in order of need: at stages 1 and 2 all of them,
    behind the step before, unless gathers are deferred."""
    return list(dict.fromkeys(visits)) if zero_stage in (1, 2) and not defers_gathers else []


def resident_windows(
    visits: Sequence[int], zero_stage: int, resident_chunks: int, defers_gathers: bool
) -> list[list[int]]:
    """The chunks whose gather must have started when each visit begins, in order of need.

    Stage 3 holds the next ``resident_chunks`` distinct chunks: with two or more, a gather runs behind the compute of
    the chunk before it, and at the turn-around nothing still needed is dropped. That gives K(2N - 2B) + B gathers for
    the layered order with K groups, N chunks on the rank and B < N resident ones, else N. Stages 1 and 2 gather every
    chunk once: behind the step, or deferred to one visit ahead. Stage 0 gathers nothing.
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
