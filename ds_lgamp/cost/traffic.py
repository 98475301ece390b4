"""Predicts the collectives and messages of one step by reading a rank's program."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ds_lgamp.cost.memory import ElementBytes, UnitSize
from ds_lgamp.schedule.actions import PARTITION, RECEIVES, SENDS, Action, Kind


@dataclass
class Traffic:
    """Counts of one step on one rank, with two or more data-parallel ranks. With one, only messages remain."""

    gathers: int = 0
    """Gathers of chunks."""
    reduces: int = 0
    """Reductions of chunks."""
    sends: int = 0
    """Messages, one per micro-batch and result: activations and gradients."""
    receives: int = 0
    tied_gathers: int = 0
    tied_reduces: int = 0
    frozen_gathers: int = 0
    """Gathers of frozen parameters, at stage 3 only. Trainable parameters of the same chunk or tied module are gathered
    separately."""


def predict_traffic(
    actions: Sequence[Action],
    zero_stage: int,
    chunks: Collection[int],
    tied_users: Sequence[Collection[int]],
    frozen_users: Sequence[Collection[int]] = (),
) -> Traffic:
    """Counts the traffic of a rank's program.

    Args:
        chunks: the chunks of the rank that have trainable parameters of their own.
        tied_users: for each trainable tied module on the rank, the chunks of the rank that use it. The module is
            gathered with the first user that needs it and reduced after the last.
        frozen_users: for each chunk and tied module with frozen parameters, the chunks of the rank that use them.
            Frozen parameters never change, so they are gathered at stage 3 only and never reduced.
    """
    traffic = Traffic()
    if zero_stage == 3:
        traffic.frozen_gathers = sum(_gathers_of_frozen(actions, users) for users in frozen_users)
    holders: list[set[int]] = [set() for _ in tied_users]
    reduced: list[set[int]] = [set() for _ in tied_users]
    gathered_once: set[int] = set()
    for action in actions:
        using = [index for index, users in enumerate(tied_users) if action.chunk in users]
        if action.kind is Kind.GATHER:
            traffic.gathers += action.chunk in chunks
            for index in using:
                traffic.tied_gathers += not holders[index] and (zero_stage == 3 or index not in gathered_once)
                gathered_once.add(index)
                holders[index].add(action.chunk)
        elif action.kind is Kind.RELEASE:
            for index in using:
                holders[index].discard(action.chunk)
        elif action.kind is Kind.REDUCE:
            traffic.reduces += action.chunk in chunks
            for index in using:
                reduced[index].add(action.chunk)
                if reduced[index] == set(tied_users[index]):
                    traffic.tied_reduces += 1
                    reduced[index].clear()
        traffic.sends += action.kind in SENDS
        traffic.receives += action.kind in RECEIVES
    return traffic


def collective_bytes(
    actions: Sequence[Action], unit: UnitSize, zero_stage: int, data_ranks: int, size: ElementBytes
) -> int:
    """Returns the bytes a rank sends for one unit in a step, counted as ``CollectiveCounter`` counts them.

    With W data-parallel ranks:

    - A gather sends W-1 parts.
    - A reduce-scatter sends (W-1)/W of the gradient.
    - An all-reduce sends 2(W-1)/W of the gradient. In rank order, an all-to-all and a gather replace it and send as
      much.
    - The sum of T copies of a tied unit sends T-1 parts.
    """
    moves = [action for action in actions if action.kind in PARTITION]
    if unit.frozen:
        traffic = predict_traffic(moves, zero_stage, [], [], [unit.chunks])
    else:
        own, tied = ([], [unit.chunks]) if unit.tied else (unit.chunks, [])
        traffic = predict_traffic(moves, zero_stage, own, tied)
    part = unit.part(zero_stage, data_ranks)
    gather = size.weights * part * (data_ranks - 1)
    if zero_stage == 0:
        reduce = 2 * size.travelling * part * (data_ranks - 1) // data_ranks
    else:
        reduce = size.travelling * part * (data_ranks - 1)
    return (
        (traffic.gathers + traffic.tied_gathers + traffic.frozen_gathers) * gather
        + (traffic.reduces + traffic.tied_reduces) * reduce
        + (unit.copies - 1) * size.master * part
    )


def _gathers_of_frozen(actions: Sequence[Action], users: Collection[int]) -> int:
    """Counts gathers at stage 3: one whenever a user needs the parameters and no user holds them."""
    gathers = 0
    holders: set[int] = set()
    for action in actions:
        if action.chunk in users:
            if action.kind is Kind.GATHER:
                gathers += not holders
                holders.add(action.chunk)
            elif action.kind is Kind.RELEASE:
                holders.discard(action.chunk)
    return gathers
