"""Prepares text for BERT: documents become sentences, and these become pairs of segments, in shards on disk.

The second segment follows the first in the text, or comes from another document; that is what next-sentence prediction
learns to tell (arXiv 1810.04805, section 3.1).
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bert_data import (
    CLASSIFY,
    CONTINUING,
    FORMAT,
    HEADER,
    INDEX,
    SEPARATE,
    SOURCES,
    SPECIAL,
    TOKENIZER,
    TRAINING,
    UNKNOWN,
    VALIDATION,
    digest,
)
from bert_packing import windows
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n")
HELD_OUT = 20
"""One of so many documents is held out for validation."""
SHORT, SHORTEST = 0.1, 2
"""The share of pairs that are made shorter than the sequence, and the tokens of the shortest."""
CONTINUES, OTHER = 0, 1
"""Labels of pairs, as transformers has them."""
Document = list[list[int]]
"""Tokens by sentence."""


class Pair(NamedTuple):
    """Two segments of text and whether the second continues the first. A passage alone has an empty second one."""

    label: int
    first: list[int]
    second: list[int]


def wordpiece(documents: Sequence[str], vocab_size: int) -> Tokenizer:
    """Trains an uncased WordPiece."""
    tokenizer = _uncased({})
    letters = sorted({letter for document in documents for letter in tokenizer.normalizer.normalize_str(document)})
    # The trainer would number the letters that go on with a word in a random order.
    first = [*SPECIAL, *(f"{CONTINUING}{letter}" for letter in letters if not letter.isspace())]
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=first, show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    return _uncased(tokenizer.get_vocab())


def read_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer.json, or a vocab.txt with a token per line. Raises SystemExit if BERT's tokens are missing."""
    if path.suffix == ".json":
        tokenizer = Tokenizer.from_file(str(path))
    else:
        words = path.read_text(encoding="utf-8").split()
        tokenizer = _uncased({word: number for number, word in enumerate(words)})
    missing = [word for word in SPECIAL if tokenizer.token_to_id(word) is None]
    if missing:
        raise SystemExit(f"--tokenizer is {path}, which lacks {' '.join(missing)}; name a WordPiece made for BERT")
    return tokenizer


def _uncased(vocabulary: dict[str, int]) -> Tokenizer:
    """Returns an uncased WordPiece. Text never becomes one of the special tokens, even if it spells one."""
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNKNOWN, max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(CONTINUING)
    return tokenizer


def in_sentences(documents: Sequence[str], tokenizer: Tokenizer) -> list[Document]:
    """Returns the tokens of every document that has any, by sentence."""
    tokenized = []
    for document in documents:
        encodings = tokenizer.encode_batch(SENTENCE_END.split(document), add_special_tokens=False)
        tokenized.append([encoding.ids for encoding in encodings if encoding.ids])
    return [document for document in tokenized if document]


def pairs(documents: Sequence[Document], length: int, random: np.random.Generator) -> Iterator[Pair]:
    """Yields pairs of at most ``length`` tokens with [CLS] and two [SEP]. About half of them continue, fewer if
    documents have a single sentence."""
    room = length - 3
    for number, document in enumerate(documents):
        start = 0
        while start < len(document):
            wanted = int(random.integers(SHORTEST, room + 1)) if random.random() < SHORT else room
            end = _end(document, start, wanted)
            cut = start + 1 if end - start < 3 else int(random.integers(start + 1, end))
            first, second = _joined(document[start:cut]), _joined(document[cut:end])
            label, start = CONTINUES, end
            if not second or random.random() < 0.5:
                # What would have continued is left for the next pair.
                label, start = OTHER, cut
                second = _from_another(documents, number, wanted - len(first), random)
            _shorten(first, second, wanted, random)
            yield Pair(label, first, second)


def _end(document: Document, start: int, wanted: int) -> int:
    """Returns the end of the sentences from ``start`` on that have ``wanted`` tokens; those of the document if fewer
    are left."""
    tokens = 0
    for end in range(start, len(document)):
        tokens += len(document[end])
        if tokens >= wanted:
            return end + 1
    return len(document)


def _from_another(documents: Sequence[Document], number: int, wanted: int, random: np.random.Generator) -> list[int]:
    """Returns about ``wanted`` tokens of a document other than ``number``."""
    other = documents[(number + int(random.integers(1, len(documents)))) % len(documents)]
    start = int(random.integers(len(other)))
    return _joined(other[start : _end(other, start, max(1, wanted))])


def _joined(sentences: Document) -> list[int]:
    return [token for sentence in sentences for token in sentence]


def _shorten(first: list[int], second: list[int], room: int, random: np.random.Generator) -> None:
    """Drops tokens from the longer segment, at random from its beginning or its end, until both fit."""
    while len(first) + len(second) > max(room, SHORTEST):
        del max(first, second, key=len)[0 if random.random() < 0.5 else -1]


def row_of(pair: Pair, length: int, tokenizer: Tokenizer) -> list[int]:
    """Returns a pair as a shard has it, padded to ``length`` tokens."""
    classify, separate = tokenizer.token_to_id(CLASSIFY), tokenizer.token_to_id(SEPARATE)
    first = [classify, *pair.first, separate]
    tokens = [*first, *pair.second, separate] if pair.second else first
    padding = [tokenizer.token_to_id(SPECIAL[0])] * (length - len(tokens))
    return [pair.label, len(first), len(tokens), *tokens, *padding]


def unigram_loss(training: Sequence[Document], validation: Sequence[Document], vocabulary: int) -> float:
    """Returns the mean loss, in nats per token, of predicting held-out tokens by their frequency in the training text.
    Every token counts once more than it occurs."""
    counts = Counter(token for document in training for sentence in document for token in sentence)
    everything = sum(counts.values()) + vocabulary
    held_out = Counter(token for document in validation for sentence in document for token in sentence)
    losses = {token: math.log(everything / (counts[token] + 1)) for token in held_out}
    return sum(losses[token] * count for token, count in held_out.items()) / sum(held_out.values())


def passages(sources: Sequence[Sequence[Document]], length: int) -> Iterator[Pair]:
    """Yields passages of whole sentences, labelled with their source."""
    for label, documents in enumerate(sources):
        for document in documents:
            start = 0
            while start < len(document):
                end = _end(document, start, length - 2)
                yield Pair(label, _joined(document[start:end])[: length - 2], [])
                start = end


def prepare(
    sources: Mapping[str, Sequence[str]],
    folder: Path,
    tokenizer: Tokenizer,
    lengths: Sequence[int],
    shards: int,
    seed: int,
) -> str:
    """Writes a folder that :class:`bert_data.PreparedData` reads, whole or not at all. Returns a summary.

    Args:
        sources: documents by the name of their source.
        folder: the folder.
        tokenizer: the WordPiece.
        lengths: sequence lengths of the phases.
        shards: number of files that the training data of a length are dealt into.
        seed: that of pairs and order.

    Raises SystemExit if there are too few documents.
    """
    tokenized = [in_sentences(documents, tokenizer) for documents in sources.values()]
    held_out = [documents[::HELD_OUT] for documents in tokenized]
    training = [[d for number, d in enumerate(documents) if number % HELD_OUT] for documents in tokenized]
    parts = {TRAINING: sum(training, []), VALIDATION: sum(held_out, [])}
    if min(map(len, parts.values())) < 2:
        raise SystemExit(f"found {sum(map(len, tokenized))} documents with text, need {2 * HELD_OUT}; give more text")
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer.save(str(partial / TOKENIZER))
    written, summary = {}, []
    for length in lengths:
        random = np.random.default_rng((seed, length))
        made = {part: list(pairs(documents, length, random)) for part, documents in parts.items()}
        written[str(length)] = _write(partial, str(length), length, made, tokenizer, shards, random)
        summary.append(_padding([len(pair.first) + len(pair.second) + 3 for pair in made[TRAINING]], length, shards))
    if len(sources) > 1:
        random = np.random.default_rng(seed)
        made = {TRAINING: list(passages(training, lengths[0])), VALIDATION: list(passages(held_out, lengths[0]))}
        written[SOURCES] = _write(partial, SOURCES, lengths[0], made, tokenizer, shards, random)
    index = {
        "format": FORMAT,
        "tokenizer": digest(partial / TOKENIZER),
        "unigram_loss": unigram_loss(parts[TRAINING], parts[VALIDATION], tokenizer.get_vocab_size()),
        "sources": list(sources),
        "shards": written,
    }
    (partial / INDEX).write_text(json.dumps(index, indent=1))
    partial.rename(folder)
    return f"{sum(map(len, tokenized))} documents, vocabulary of {tokenizer.get_vocab_size()}, {'; '.join(summary)}"


def _padding(tokens: Sequence[int], length: int, shards: int) -> str:
    """Returns how much of the rows is padding, with a pair in each and packed. ``tokens`` are those of every pair."""
    # Each shard is packed by itself. In another order its pairs make nearly as many rows.
    rows = sum(len(window) for shard in range(shards) for window in windows(tokens[shard::shards], length))
    apart, packed = (1 - sum(tokens) / (length * number) for number in (len(tokens), rows))
    pairs = f"{len(tokens)} pairs of {length} tokens, {apart:.1%} of them padding"
    return f"{pairs} (packed: {rows} rows, {packed:.1%} padding)"


def _write(
    folder: Path,
    kind: str,
    length: int,
    made: Mapping[str, list[Pair]],
    tokenizer: Tokenizer,
    shards: int,
    random: np.random.Generator,
) -> dict[str, list[dict[str, Any]]]:
    """Shuffles the pairs of every part and deals them into shards; those of validation are one shard. Returns the
    entries of the index."""
    (folder / kind).mkdir()
    size = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    entries: dict[str, list[dict[str, Any]]] = {}
    for part, each in made.items():
        number = shards if part == TRAINING else 1
        if len(each) < number:
            raise SystemExit(f"--shards is {number}, but there are {len(each)} pairs of {length} tokens; use fewer")
        rows = np.array([row_of(pair, length, tokenizer) for pair in each], dtype=size)
        assert rows.shape[1] == HEADER + length
        random.shuffle(rows)
        entries[part] = []
        for shard in range(number):
            own, file = rows[shard::number], f"{kind}/{part}-{shard:05}.npy"
            np.save(folder / file, own)
            entries[part].append({"file": file, "rows": len(own), "sha256": digest(folder / file)})
    return entries
