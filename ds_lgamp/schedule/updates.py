"""Passes that add the optimizer's updates of single chunks, on the device or on the host.

:meth:`ds_lgamp.schedule.spec.ProgramSpec.chunk_updates` says when each chunk is updated, and by what.
"""

from collections.abc import Iterator, Sequence

from ds_lgamp.schedule.actions import COMPUTE, Action, Kind, Segments
from ds_lgamp.schedule.spec import ProgramSpec, Update


def add_postponed_updates(spec: ProgramSpec, rank: int, segments: Segments) -> Segments:
    """Adds each UPDATE that the step before left to this one, before the first gather or forward of its chunk."""
    if spec.forward_only:
        return segments
    updates = spec.chunk_updates
    postponed = {chunk for chunk, update in updates.items() if update.when == "next_step" and not update.on_host}
    if not postponed:
        return segments
    lowered: Segments = []
    for segment in segments:
        lowered.append([])
        for action in segment:
            if action.chunk in postponed:
                postponed.remove(action.chunk)
                lowered[-1].append(Action(Kind.UPDATE, action.chunk))
            lowered[-1].append(action)
    return lowered


def add_final_updates(spec: ProgramSpec, rank: int, segments: Segments) -> Segments:
    """Adds each UPDATE that need not wait for STEP, after the end of its chunk's last reduction."""
    at_once = {
        chunk for chunk, update in spec.chunk_updates.items() if update.when == "reduction" and not update.on_host
    }
    if spec.forward_only or not at_once:
        return segments
    *calls, actions = segments
    lowered: list[Action] = []
    for action, update in ready_gradients(spec, actions):
        lowered.append(action)
        if update is not None and action.chunk in at_once:
            lowered.append(Action(Kind.UPDATE, action.chunk))
    return [*calls, lowered]


def add_stores(spec: ProgramSpec, rank: int, segments: Segments) -> Segments:
    """Adds STORE after the end of the last reduction of each chunk that the host updates. One STORE is under way at a
    time; its WAIT_STORE comes before the next one, or before STEP. UPDATE follows that wait, or STEP if that decides
    whether and how to update."""
    if spec.offload is None or spec.forward_only:
        return segments
    *calls, actions = segments
    lowered: list[Action] = []
    stored: list[int] = []
    under_way: int | None = None

    def finish() -> list[Action]:
        if under_way is None:
            return []
        at_once = spec.chunk_updates[under_way].when == "reduction"
        return [Action(Kind.WAIT_STORE, under_way), *([Action(Kind.UPDATE, under_way)] if at_once else [])]

    for action, update in ready_gradients(spec, actions):
        if action.kind is Kind.STEP:
            lowered.extend(finish())
        lowered.append(action)
        if update is not None and update.on_host:
            lowered.extend(finish())
            under_way = action.chunk
            stored.append(under_way)
            lowered.append(Action(Kind.STORE, under_way))
        if action.kind is Kind.STEP:
            visits = dict.fromkeys(each.chunk for segment in segments for each in segment if each.kind in COMPUTE)
            postponed = {chunk for chunk in stored if spec.chunk_updates[chunk].when == "next_step"}
            lowered.extend(Action(Kind.UPDATE, chunk) for chunk in visits if chunk in postponed)
    return [*calls, lowered]


def ready_gradients(spec: ProgramSpec, actions: Sequence[Action]) -> Iterator[tuple[Action, Update | None]]:
    """Yields each action with the update of the chunk whose last reduction it ends; with None if it ends none."""
    updates = spec.chunk_updates
    last = {
        action.chunk: row
        for row, action in enumerate(actions)
        if action.chunk in updates and action.kind is updates[action.chunk].ready_after
    }
    for row, action in enumerate(actions):
        yield action, updates[action.chunk] if last.get(action.chunk) == row else None
