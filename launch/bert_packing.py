"""Packs pairs of BERT's data into rows of one length, without padding between them.

Every shard is an endless stream of rows: the pairs of an epoch in their order, window by window, then those of the next
one. Row i is in the stream of shard i mod S of S. So the same rows make up a batch on any number of ranks, and a rank
reads only its own shards. A run goes on at any row, because lengths alone say which pairs the rows ahead of it hold. A
pair has the masks that it has in a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np
import torch
from bert_data import IGNORED, Masking, Sample, Shards, order_of

PLACE = 16
"""A row has a place for one pair per so many of its tokens. Their number is fixed, so that labels have one shape."""
WINDOW = 512
"""Pairs that are packed together. Rows that are not full at the end of a window are padded."""
FEWEST = 5
"""Tokens of the shortest pair: a token per segment, [CLS] and two [SEP]."""


def places(length: int) -> int:
    """Returns the pairs that a row of ``length`` tokens holds at most."""
    return max(1, length // PLACE)


def first_fit(tokens: Sequence[int], length: int) -> list[list[int]]:
    """Returns the pairs of every row by number: each joins the first row that has room for it.

    Args:
        tokens: those of every pair, at most ``length``.
        length: tokens of a row.
    """
    rows: list[list[int]] = []
    room: dict[int, int] = {}
    """The free tokens of rows that may take another pair."""
    for number, own in enumerate(tokens):
        row = next((row for row, free in room.items() if free >= own), len(rows))
        if row == len(rows):
            rows.append([])
            room[row] = length
        rows[row].append(number)
        room[row] -= own
        if room[row] < FEWEST or len(rows[row]) == places(length):
            del room[row]
    return rows


def windows(tokens: Sequence[int], length: int) -> Iterator[list[list[int]]]:
    """Yields the pairs of every row by number, for one window after another. Arguments are those of
    :func:`first_fit`."""
    for start in range(0, len(tokens), WINDOW):
        rows = first_fit(tokens[start : start + WINDOW], length)
        yield [[start + number for number in row] for row in rows]


def rows_of_shard(shards: Shards, shard: int, seed: int, length: int) -> Iterator[list[Sample]]:
    """Yields the pairs of every row of a shard's stream, without end. Every epoch has each pair of the shard once."""
    tokens = shards.tokens(shard)
    for epoch in count():
        order = order_of(shards.rows[shard], seed, epoch, shard)
        random = np.random.default_rng((seed, epoch, shard, length))
        for rows in windows(tokens[order].tolist(), length):
            # The first rows of a window took most of the short pairs. In this order batches are alike.
            for row in random.permutation(len(rows)):
                yield [Sample(epoch, shard, int(order[number])) for number in rows[row]]


def rows_of_rank(
    shards: Shards, seed: int, length: int, rank: int, ranks: int, first: int = 0
) -> Iterator[list[Sample]]:
    """Yields the pairs of every row of a rank, without end.

    Args:
        shards: those of the pairs.
        seed: that of the order.
        length: tokens of a row.
        rank, ranks: this rank among all that train.
        first: rows that all ranks together have seen, a multiple of ``ranks``.
    """
    streams: dict[int, Iterator[tuple[int, list[Sample]]]] = {}
    for number in count(first + rank, ranks):
        position, shard = divmod(number, len(shards))
        if shard not in streams:
            streams[shard] = enumerate(rows_of_shard(shards, shard, seed, length))
        yield next(row for place, row in streams[shard] if place == position)


def packed(pairs: Sequence[dict[str, torch.Tensor]], length: int, padding: int) -> dict[str, torch.Tensor]:
    """Returns the arguments of :class:`packed_bert.PackedBert` for a row.

    Args:
        pairs: what :class:`bert_data.Masking` returns for each.
        length: tokens of the row.
        padding: the token that fills its end.

    Returns tokens, their types, positions that begin anew with every pair and with the padding, and labels, each
    [length], and a label per place for a pair, [places]. Labels of padding and of unused places are ignored.
    """
    used = [int(pair["attention_mask"].sum()) for pair in pairs]
    rest = length - sum(used)

    def joined(name: str, filling: int) -> torch.Tensor:
        return torch.cat([*(pair[name][:own] for pair, own in zip(pairs, used)), torch.full((rest,), filling)])

    next_sentences = torch.full((places(length),), IGNORED)
    next_sentences[: len(pairs)] = torch.stack([pair["next_sentence_label"] for pair in pairs])
    return {
        "input_ids": joined("input_ids", padding),
        "token_type_ids": joined("token_type_ids", 0),
        "position_ids": torch.cat([torch.arange(own) for own in (*used, rest)]),
        "labels": joined("labels", IGNORED),
        "next_sentence_label": next_sentences,
    }


def packed_rows(
    shards: Shards, masking: Masking, rows: Iterator[list[Sample]], length: int, padding: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yields the arguments of the model for every row, as :func:`packed` returns them."""
    for row in rows:
        yield packed([masking(shards.row(pair.shard, pair.row), pair) for pair in row], length, padding)
