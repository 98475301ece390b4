"""Reads what ``prepare_data.py --bert`` wrote: pairs of segments in memory-mapped shards, masked anew in every epoch.

A sample's place in an epoch depends on seed and epoch, and its masks on the sample too. So the same samples make up a
batch on any number of ranks, and a run goes on at any sample. Sample i of an epoch is in shard i mod S of S. With W
ranks, rank r takes the samples r, r + W, ... and reads only shards that differ from r by a multiple of gcd(W, S).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer

FORMAT = 1
INDEX, TOKENIZER = "index.json", "tokenizer.json"
TRAINING, VALIDATION = "training", "validation"
SOURCES = "sources"
"""The kind of shards whose rows are passages, labelled with the source that they come from, for fine-tuning."""
PADDING, UNKNOWN, CLASSIFY, SEPARATE, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUING = "##"
"""The beginning of tokens that go on with a word."""
HEADER = 3
"""Numbers ahead of the tokens in a row: the label, tokens of the first segment with [CLS] and [SEP], and all tokens."""
MASKED, RANDOM = 0.15, 0.1
"""Of the tokens of a sample, those to predict; of these, those that become random and those that stay, each. The rest
becomes [MASK] (arXiv 1810.04805, section 3.1)."""
IGNORED = -100
"""The label of tokens that are not predicted."""


class Sample(NamedTuple):
    """One sample of one epoch."""

    epoch: int
    shard: int
    row: int


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        sums = hashlib.sha256()
        while block := file.read(1 << 20):
            sums.update(block)
    return sums.hexdigest()


class PreparedData:
    """A folder that ``prepare_data.py --bert`` wrote.

    Raises SystemExit if it is missing, of another format, or has a tokenizer that did not make its shards.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / INDEX).is_file():
            raise SystemExit(f"--data is {folder}, which has no {INDEX}; write it with launch/prepare_data.py --bert")
        if not (self.folder / TOKENIZER).is_file():
            raise SystemExit(f"--data is {folder}, which has no {TOKENIZER}; copy that of the prepared data too")
        self._index: dict[str, Any] = self._read_index()
        if self._index["format"] != FORMAT:
            raise SystemExit(f"{folder} has format {self._index['format']}, not {FORMAT}; prepare the text again")
        self.tokenizer_digest: str = self._index["tokenizer"]
        if digest(self.folder / TOKENIZER) != self.tokenizer_digest:
            raise SystemExit(
                f"the shards in {folder} come from another tokenizer than its {TOKENIZER}; "
                "put back the tokenizer that made them, or prepare the text again"
            )
        self.unigram_loss: float = self._index["unigram_loss"]
        self.sources: list[str] = self._index["sources"]

    def _read_index(self) -> dict[str, Any]:
        try:
            return json.loads((self.folder / INDEX).read_text())
        except ValueError:
            raise SystemExit(f"{self.folder / INDEX} is damaged; copy it again, or prepare the text again") from None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.folder / TOKENIZER))

    def shards(self, kind: str, part: str) -> Shards:
        """Returns the shards of ``part``, TRAINING or VALIDATION. ``kind`` is a sequence length or SOURCES.

        Raises SystemExit if they were not prepared.
        """
        parts = self._index["shards"]
        if kind not in parts:
            raise SystemExit(f"{self.folder} has shards of {', '.join(parts)}, not of {kind}; prepare those too")
        return Shards(self.folder, parts[kind][part])


class Shards:
    """Files of rows, each an array [rows, 3 + sequence length] that is mapped into memory when it is first read."""

    def __init__(self, folder: Path, entries: Sequence[dict[str, Any]]) -> None:
        self._folder, self._entries = folder, entries
        self._arrays: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def rows(self) -> list[int]:
        """Rows of every shard."""
        return [entry["rows"] for entry in self._entries]

    @property
    def opened(self) -> list[int]:
        """The shards that were read so far."""
        return sorted(self._arrays)

    def row(self, shard: int, row: int) -> np.ndarray:
        """Returns a row. Raises SystemExit if the shard is missing, or has other bytes than when it was prepared."""
        return self._array(shard)[row]

    def tokens(self, shard: int) -> np.ndarray:
        """Returns the tokens of every row of a shard without its padding, [rows]. Raises SystemExit as :meth:`row`."""
        return np.array(self._array(shard)[:, HEADER - 1])

    def _array(self, shard: int) -> np.ndarray:
        if shard not in self._arrays:
            self._arrays[shard] = self._open(**self._entries[shard])
        return self._arrays[shard]

    def _open(self, file: str, rows: int, sha256: str) -> np.ndarray:
        path = self._folder / file
        if not path.is_file():
            raise SystemExit(f"{path} is missing; copy this rank's part of the prepared data to this node")
        if digest(path) != sha256:
            raise SystemExit(f"{path} has changed since it was prepared; copy it again, or prepare the text again")
        return np.load(path, mmap_mode="r")


def samples_of_rank(rows: Sequence[int], seed: int, rank: int, ranks: int, first: int = 0) -> Iterator[Sample]:
    """Yields the samples of a rank, without end. An epoch takes as many rows of every shard as the shortest one has.

    Args:
        rows: rows of every shard.
        seed: that of the order.
        rank, ranks: this rank among all that train.
        first: samples that all ranks together have seen, a multiple of ``ranks``.
    """
    shards, shortest = len(rows), min(rows)
    order: dict[int, tuple[int, np.ndarray]] = {}
    number = first + rank
    while True:
        epoch, place = divmod(number, shards * shortest)
        position, shard = divmod(place, shards)
        if shard not in order or order[shard][0] != epoch:
            order[shard] = epoch, order_of(rows[shard], seed, epoch, shard)
        yield Sample(epoch, shard, int(order[shard][1][position]))
        number += ranks


def order_of(rows: int, seed: int, epoch: int, shard: int) -> np.ndarray:
    """Returns the rows of a shard in the order of an epoch."""
    return np.random.default_rng((seed, epoch, shard)).permutation(rows)


def shards_of_rank(shards: int, rank: int, ranks: int) -> list[int]:
    """Returns the shards that :func:`samples_of_rank` takes a rank to."""
    step = math.gcd(shards, ranks)
    return list(range(rank % step, shards, step))


class Masking:
    """Masks whole words of rows, for :class:`transformers.BertForPreTraining`.

    Args:
        tokenizer: a WordPiece.
        seed: that of all masks.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._seed, self._size = seed, tokenizer.get_vocab_size()
        words = [tokenizer.id_to_token(number) for number in range(self._size)]
        self._goes_on = np.array([word.startswith(CONTINUING) for word in words])
        self._special = np.array([word in SPECIAL for word in words])
        self._ordinary = np.flatnonzero(~self._special)
        self._mask = tokenizer.token_to_id(MASK)

    def __call__(self, row: np.ndarray, sample: Sample) -> dict[str, torch.Tensor]:
        """Returns the arguments of the model for one sample, each [sequence length] but the label of the pair."""
        label, first, length = map(int, row[:HEADER])
        tokens = row[HEADER:].astype(np.int64)
        random = np.random.default_rng((self._seed, *sample))
        chosen = self._chosen(tokens[:length], random)
        labels = np.full_like(tokens, IGNORED)
        labels[chosen] = tokens[chosen]
        fate = random.random(len(chosen))
        tokens[chosen[fate >= 2 * RANDOM]] = self._mask
        replaced = chosen[fate < RANDOM]
        tokens[replaced] = random.choice(self._ordinary, len(replaced))
        place = np.arange(len(tokens))
        arguments = {
            "input_ids": tokens,
            "attention_mask": (place < length).astype(np.int64),
            "token_type_ids": ((first <= place) & (place < length)).astype(np.int64),
            "labels": labels,
            "next_sentence_label": np.int64(label),
        }
        return {name: torch.as_tensor(value) for name, value in arguments.items()}

    def _chosen(self, tokens: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Returns the places of whole words with at most a share of ``MASKED`` of all tokens; one word at least."""
        special = self._special[tokens]
        # A segment that lost its beginning may begin inside a word.
        begins = ~special & (~self._goes_on[tokens] | np.roll(special, 1))
        words = np.where(special, 0, np.cumsum(begins))
        sizes = np.bincount(words, minlength=words.max() + 1)
        order = 1 + random.permutation(len(sizes) - 1)
        order = order[sizes[order] > 0]
        within = np.cumsum(sizes[order]) <= max(1, round(MASKED * len(tokens)))
        within[:1] = True
        return np.flatnonzero(np.isin(words, order[within]))


def passage(row: np.ndarray, _sample: Sample) -> dict[str, torch.Tensor]:
    """Returns the arguments of :class:`transformers.BertForSequenceClassification` for a row that is a passage."""
    tokens = torch.as_tensor(row[HEADER:].astype(np.int64))
    attended = (torch.arange(len(tokens)) < int(row[2])).long()
    return {"input_ids": tokens, "attention_mask": attended, "labels": torch.tensor(int(row[0]))}


def rows_of(
    shards: Shards, arguments: Callable[[np.ndarray, Sample], dict[str, torch.Tensor]], samples: Iterator[Sample]
) -> Iterator[dict[str, torch.Tensor]]:
    """Yields the arguments of the model for every sample. ``arguments`` makes them of its row."""
    for sample in samples:
        yield arguments(shards.row(sample.shard, sample.row), sample)


def micro_batches(rows: Iterator[dict[str, torch.Tensor]], size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yields micro-batches of ``size`` rows as long as there are any. A row is what the model gets for it."""
    while drawn := list(islice(rows, size)):
        yield {name: torch.stack([row[name] for row in drawn]) for name in drawn[0]}
