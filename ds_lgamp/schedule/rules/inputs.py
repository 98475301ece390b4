"""Which chunks are recomputed, and when their inputs travel to the host and back."""

from collections.abc import Sequence
from itertools import pairwise

from ds_lgamp.schedule.actions import OF_INPUTS, SENDS, Action, Kind
from ds_lgamp.schedule.rules.stops import Fault, Stop, texts
from ds_lgamp.schedule.spec import NEAREST, ProgramSpec


def check_recomputation(spec: ProgramSpec, stops: Sequence[Stop]) -> None:
    """A compute is recomputed if the spec recomputes, its chunk has backwards, and it is not the model's last chunk
    with a backward directly behind each forward."""
    actions = [stop.action for stop in stops if stop.action is not None]
    trained = {action.chunk for action in actions if action.kind is Kind.BACKWARD} if spec.recomputes else set()
    last = spec.chunks - 1
    if all(
        following[:3] == (Kind.BACKWARD, last, action.micro_batch)
        for action, following in pairwise(actions)
        if action.kind is Kind.FORWARD and action.chunk == last
    ):
        trained.discard(last)
    for stop in stops:
        if stop.action is not None and stop.action.recomputed != (stop.action.chunk in trained):
            fault = "is not" if stop.action.recomputed else "is"
            raise Fault(stop.row, f"{stop} {fault} to be recomputed")


def check_inputs(spec: ProgramSpec, stops: Sequence[Stop]) -> None:
    """- An input of a chunk above 0 leaves if its backward is ``NEAREST`` computes behind its forward, or the script's
      turn lies between: directly behind its forward and the SEND of that.
    - One leaves at a time. A rank waits for it when the next one leaves, or comes back.
    - It comes back one compute ahead of its backward, and not ahead of the script's turn. The backward waits for it.
    """
    if not spec.stores_inputs:
        return
    leaving = _leaving(stops)
    under_way: Action | None = None
    before: Action | None = None
    for number, stop in enumerate(stops):
        behind: list[Action] = []
        if before in leaving and before is not None and before.kind is Kind.FORWARD:
            behind = [*_of(Kind.WAIT_STORE_INPUT, under_way), *_of(Kind.STORE_INPUT, before)]
            under_way = before
        loads: list[Action] = []
        if stop.computes:
            due = [stop.action] if before is not None and before.kind is Kind.RETURN else []
            due.append(stops[number + 1].action)
            loads = [load for each in due if _comes_back(each, leaving) for load in _of(Kind.LOAD_INPUT, each)]
        ahead = loads
        if loads:
            ahead = [*_of(Kind.WAIT_STORE_INPUT, under_way), *loads]
            under_way = None
        if _comes_back(stop.action, leaving):
            ahead = [*ahead, *_of(Kind.WAIT_LOAD_INPUT, stop.action)]
        _check(stop, behind, ahead)
        before = stop.action


def _check(stop: Stop, behind: list[Action], ahead: list[Action]) -> None:
    """Checks what stands directly behind the compute before ``stop``, and directly ahead of ``stop``."""
    rest = [action for action in stop.ahead if action.kind not in SENDS]
    inner = rest[len(behind) : len(rest) - len(ahead)]
    if rest != [*behind, *inner, *ahead] or any(action.kind in OF_INPUTS for action in inner):
        fault = f"ahead of {stop} inputs move by {texts(stop.of(*OF_INPUTS))}"
        raise Fault(stop.row, f"{fault}; first must stand {texts(behind)}, and last {texts(ahead)}")


def _leaving(stops: Sequence[Stop]) -> set[Action]:
    """Returns the forwards whose inputs leave, and their backwards."""
    leaving: set[Action] = set()
    forwards: dict[tuple[int, int], int] = {}
    place = 0
    for stop in stops:
        action = stop.action
        place += NEAREST if action is not None and action.kind is Kind.RETURN else 1
        if action is None or action.chunk < 1 or not action.recomputed:
            continue
        if action.kind is Kind.FORWARD:
            forwards[action.chunk, action.micro_batch] = place
        elif place - forwards[action.chunk, action.micro_batch] >= NEAREST:
            leaving |= {action, action._replace(kind=Kind.FORWARD)}
    return leaving


def _comes_back(action: Action | None, leaving: set[Action]) -> bool:
    return action is not None and action.kind is Kind.BACKWARD and action in leaving


def _of(kind: Kind, compute: Action | None) -> list[Action]:
    return [] if compute is None else [Action(kind, compute.chunk, compute.micro_batch)]
