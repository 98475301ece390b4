"""BERT's data: pairs made of text, their order on any number of ranks, and masks."""

import importlib
import itertools
import json
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testing import ROOT

WORDS = "quick brown foxes jumped over lazy dogs while nobody was watching them from behind these tall hedges".split()
LENGTH, SHARDS = 32, 4


@pytest.fixture(scope="module", autouse=True)
def scripts():
    """Makes the modules beside the scripts importable."""
    sys.path.insert(0, str(ROOT / "launch"))
    yield
    sys.path.remove(str(ROOT / "launch"))


def module(name):
    return importlib.import_module(name)


def documents(number, seed):
    """Makes documents of sentences of 3 to 8 words. The second words tell the documents apart."""
    random = np.random.default_rng(seed)
    return [
        " ".join(
            f"Text {seed}{index:02} {' '.join(random.choice(WORDS, random.integers(1, 7)))}."
            for _ in range(random.integers(1, 9))
        )
        for index in range(number)
    ]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Returns a folder of data from two sources."""
    folder = tmp_path_factory.mktemp("data") / "text.bert"
    prepare(folder)
    return folder


def prepare(folder, seed=5, shards=SHARDS):
    pairs = module("bert_pairs")
    sources = {"first": documents(60, 1), "second": documents(40, 2)}
    tokenizer = pairs.wordpiece([text for each in sources.values() for text in each], 120)
    return pairs.prepare(sources, folder, tokenizer, [LENGTH, 2 * LENGTH], shards, seed)


def rows_of(folder, kind, part="training"):
    data = module("bert_data").PreparedData(folder)
    shards = data.shards(str(kind), part)
    return data, [shards.row(shard, row) for shard, rows in enumerate(shards.rows) for row in range(rows)]


def test_the_same_text_gives_the_same_files(prepared, tmp_path):
    prepare(tmp_path / "again")
    assert (tmp_path / "again" / "index.json").read_bytes() == (prepared / "index.json").read_bytes()
    prepare(tmp_path / "other", seed=6)
    assert (tmp_path / "other" / "index.json").read_bytes() != (prepared / "index.json").read_bytes()


@pytest.mark.parametrize("length", [LENGTH, 2 * LENGTH])
def test_a_row_is_two_segments_between_separators_and_padding(prepared, length):
    data, rows = rows_of(prepared, length)
    classify, separate, padding = map(data.tokenizer.token_to_id, ("[CLS]", "[SEP]", "[PAD]"))
    for label, first, used, *tokens in (row.tolist() for row in rows):
        assert label in (0, 1) and len(tokens) == length and 5 <= used <= length
        assert tokens[0] == classify and tokens[first - 1] == tokens[used - 1] == separate
        assert tokens.count(separate) == 2 and tokens[used:] == [padding] * (length - used)


def test_a_pair_that_continues_is_one_text_and_the_others_are_of_two(prepared):
    data, rows = rows_of(prepared, LENGTH)
    texts = [
        " ".join(data.tokenizer.encode(document).tokens)
        for seed, n in ((1, 60), (2, 40))
        for document in documents(n, seed)
    ]
    labels = []
    for label, first, used, *tokens in (row.tolist() for row in rows):
        one, two = (
            [data.tokenizer.id_to_token(token) for token in part]
            for part in (tokens[1 : first - 1], tokens[first : used - 1])
        )
        labels.append(label)
        holds = [(" ".join(one) in text, " ".join(two) in text) for text in texts]
        # Both segments may have lost tokens, so one that continues need not follow at once.
        if label == 0:
            assert any(both == (True, True) for both in holds)
        assert any(of_one for of_one, _ in holds) and any(of_two for _, of_two in holds)
        if label == 1 and len(one) > 8 and len(two) > 8:
            assert not any(both == (True, True) for both in holds)
    assert 0.3 < np.mean(labels) < 0.7


def test_held_out_documents_are_in_no_training_row(prepared):
    data, rows = rows_of(prepared, LENGTH)
    held_out = rows_of(prepared, LENGTH, "validation")[1]

    def names(rows):
        words = [data.tokenizer.decode(row[3:].tolist()) for row in rows]
        return {name for text in words for name in text.split() if name.isdigit() and len(name) == 3}

    assert names(held_out) and not names(held_out) & names(rows)


@given(st.lists(st.integers(3, 9), min_size=1, max_size=8), st.integers(1, 12), st.integers(1, 5), st.integers(0, 3))
def test_any_number_of_ranks_sees_the_same_samples_in_every_batch(rows, ranks, batch, seed):
    data = module("bert_data")
    size = batch * ranks

    def batches(ranks, steps, first=0):
        """Returns the samples of every step after ``first`` ones."""
        own = [data.samples_of_rank(rows, seed, rank, ranks, first * size) for rank in range(ranks)]
        return [{next(samples) for samples in own for _ in range(size // ranks)} for _ in range(steps)]

    steps = 1 + 2 * sum(rows) // size
    alone = batches(1, steps)
    assert batches(ranks, steps) == alone
    assert batches(ranks, steps - steps // 2, first=steps // 2) == alone[steps // 2 :]


@settings(max_examples=30)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 3))
def test_an_epoch_takes_every_row_of_the_shortest_shard_once_and_the_next_one_in_another_order(rows, seed):
    data = module("bert_data")
    number = min(rows) * len(rows)
    order = list(itertools.islice(data.samples_of_rank(rows, seed, 0, 1), 2 * number))
    for epoch, seen in enumerate((order[:number], order[number:])):
        assert {sample.epoch for sample in seen} == {epoch} and len(set(seen)) == number
        assert all(sample.row < rows[sample.shard] for sample in seen)
        shortest = rows.index(min(rows))
        assert {s.row for s in seen if s.shard == shortest} == set(range(min(rows)))


def test_the_next_epoch_has_another_order():
    samples = list(itertools.islice(module("bert_data").samples_of_rank([50, 50], 0, 0, 1), 200))
    assert [s[1:] for s in samples[:100]] != [s[1:] for s in samples[100:]]


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(1, 12))
def test_a_rank_reads_only_its_own_shards(shards, ranks):
    data = module("bert_data")
    for rank in range(ranks):
        own = itertools.islice(data.samples_of_rank([5] * shards, 0, rank, ranks), 6 * shards)
        assert {sample.shard for sample in own} == set(data.shards_of_rank(shards, rank, ranks))


def test_a_node_needs_only_the_files_of_its_own_ranks(prepared, tmp_path):
    """Two ranks of four shards: rank 1 trains without the files of rank 0, and names one that it lacks."""
    data = module("bert_data")
    (tmp_path / str(LENGTH)).mkdir()
    for name in ("index.json", "tokenizer.json", *(f"{LENGTH}/training-{shard:05}.npy" for shard in (1, 3))):
        (tmp_path / name).write_bytes((prepared / name).read_bytes())
    shards = data.PreparedData(tmp_path).shards(str(LENGTH), "training")
    for sample in itertools.islice(data.samples_of_rank(shards.rows, 0, 1, 2), 50):
        shards.row(sample.shard, sample.row)
    assert shards.opened == [1, 3]
    with pytest.raises(SystemExit, match=r"training-00002.npy is missing; copy this rank's part"):
        shards.row(2, 0)


@pytest.fixture(scope="module")
def masked(prepared):
    """Returns the tokenizer and, for many samples of two epochs, the row and the arguments that masking makes of it."""
    module_, (data, rows) = module("bert_data"), rows_of(prepared, 2 * LENGTH)
    masking = module_.Masking(data.tokenizer, seed=3)
    samples = [module_.Sample(epoch, 0, number) for epoch in range(2) for number in range(len(rows))]
    return data.tokenizer, [(rows[sample.row], masking(rows[sample.row], sample)) for sample in samples], masking


def test_masked_tokens_are_labelled_and_all_others_stay(masked):
    for row, arguments in masked[1]:
        label, first, used, *tokens = row.tolist()
        tokens = torch.tensor(tokens)
        predicted = arguments["labels"] >= 0
        assert torch.equal(arguments["labels"][predicted], tokens[predicted])
        assert torch.equal(arguments["input_ids"][~predicted], tokens[~predicted])
        assert arguments["next_sentence_label"] == label
        assert arguments["attention_mask"].tolist() == [1] * used + [0] * (len(tokens) - used)
        assert arguments["token_type_ids"].tolist() == [0] * first + [1] * (used - first) + [0] * (len(tokens) - used)


def test_words_are_masked_whole_and_special_tokens_never(masked):
    tokenizer, seen, _ = masked
    split, apart = 0, False
    for row, arguments in seen:
        words = [tokenizer.id_to_token(token) for token in row[3 : 3 + row[2]].tolist()]
        predicted = (arguments["labels"] >= 0).tolist()
        for number, word in enumerate(words):
            assert not (word in ("[CLS]", "[SEP]") and predicted[number])
            if word.startswith("##") and words[number - 1] in ("[CLS]", "[SEP]"):
                # It lost its beginning, and belongs to no word of the segment ahead.
                apart |= predicted[number] != predicted[number - 2]
            elif word.startswith("##"):
                split += 1
                assert predicted[number] == predicted[number - 1]
        assert not any(predicted[row[2] :])
    assert split > 100 and apart


def test_a_sample_loses_fifteen_percent_of_its_tokens_to_masks_random_tokens_and_themselves(masked):
    tokenizer, seen, _ = masked
    mask, counts, real = tokenizer.token_to_id("[MASK]"), np.zeros(3), 0
    for row, arguments in seen:
        predicted = arguments["labels"] >= 0
        begun = [not tokenizer.id_to_token(token).startswith("##") for token in row[3:][predicted.numpy()].tolist()]
        # A sample without room for any word loses one all the same.
        assert 1 <= predicted.sum() <= round(0.15 * row[2]) or sum(begun) <= 1
        shown, wanted = arguments["input_ids"][predicted], arguments["labels"][predicted]
        counts += [(shown == mask).sum(), ((shown != mask) & (shown != wanted)).sum(), (shown == wanted).sum()]
        real += row[2]
    assert counts.sum() / real == pytest.approx(0.14, abs=0.02)
    assert counts / counts.sum() == pytest.approx([0.8, 0.1, 0.1], abs=0.03)


def test_masks_depend_on_seed_and_sample_alone(masked, prepared):
    tokenizer, seen, masking = masked
    sample, half = module("bert_data").Sample(0, 0, 0), len(seen) // 2
    again = masking(seen[0][0], sample)
    assert all(torch.equal(again[name], tensor) for name, tensor in seen[0][1].items())
    assert not all(torch.equal(seen[n][1]["labels"], seen[half + n][1]["labels"]) for n in range(5))


def test_the_unigram_loss_is_that_of_token_frequencies():
    training, validation = [[[0, 0, 1]]], [[[0], [2]]]
    # Every one of 3 tokens counts once more: frequencies 3/6, 2/6 and 1/6.
    assert module("bert_pairs").unigram_loss(training, validation, 3) == pytest.approx(np.log([2, 6]).mean())


def test_passages_are_labelled_with_their_source(prepared):
    data, rows = rows_of(prepared, "sources")
    for row in rows:
        words = data.tokenizer.decode(row[3:].tolist()).split()
        assert {int(word[0]) - 1 for word in words if word.isdigit() and len(word) == 3} == {row[0]}


def test_a_vocab_txt_and_a_tokenizer_json_are_one_tokenizer(prepared, tmp_path):
    pairs = module("bert_pairs")
    own = pairs.read_tokenizer(prepared / "tokenizer.json")
    words = sorted(own.get_vocab(), key=own.token_to_id)
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    text = "Quick foxes, [MASK] unhedged."
    assert pairs.read_tokenizer(tmp_path / "vocab.txt").encode(text).ids == own.encode(text).ids
    (tmp_path / "short.txt").write_text("\n".join(words[1:]))
    with pytest.raises(SystemExit, match=r"short.txt, which lacks \[PAD\]; name a WordPiece made for BERT"):
        pairs.read_tokenizer(tmp_path / "short.txt")


def copy_of(folder, target):
    for path in folder.rglob("*"):
        if path.is_file():
            (target / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (target / path.relative_to(folder)).write_bytes(path.read_bytes())
    return target


def test_bad_data_are_refused_in_one_sentence(prepared, tmp_path):
    data = module("bert_data")
    with pytest.raises(SystemExit, match="which has no index.json; write it with launch/prepare_data.py --bert"):
        data.PreparedData(tmp_path)
    changed = copy_of(prepared, tmp_path / "changed")
    shard = changed / str(LENGTH) / "training-00001.npy"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(SystemExit, match="training-00001.npy has changed since it was prepared; copy it again"):
        data.PreparedData(changed).shards(str(LENGTH), "training").row(1, 0)
    with pytest.raises(SystemExit, match="has shards of 32, 64, sources, not of 512; prepare those too"):
        data.PreparedData(changed).shards("512", "training")
    (changed / "tokenizer.json").write_text((prepared / "tokenizer.json").read_text().replace("##a", "##ä"))
    with pytest.raises(SystemExit, match="come from another tokenizer than its tokenizer.json; put back"):
        data.PreparedData(changed)
    index = json.loads((changed / "index.json").read_text())
    (changed / "index.json").write_text(json.dumps({**index, "format": 2}))
    with pytest.raises(SystemExit, match="has format 2, not 1; prepare the text again"):
        data.PreparedData(changed)
    (changed / "index.json").write_text("{")
    with pytest.raises(SystemExit, match="index.json is damaged; copy it again, or prepare the text again"):
        data.PreparedData(changed)
    (changed / "tokenizer.json").unlink()
    with pytest.raises(SystemExit, match="which has no tokenizer.json; copy that of the prepared data too"):
        data.PreparedData(changed)


def test_too_little_text_is_refused_and_leaves_nothing(tmp_path):
    pairs = module("bert_pairs")
    tokenizer = pairs.wordpiece(documents(5, 1), 120)
    with pytest.raises(SystemExit, match="found 0 documents with text, need 40; give more text"):
        pairs.prepare({"empty": ["", " \n"]}, tmp_path / "out", tokenizer, [LENGTH], 1, 0)
    with pytest.raises(SystemExit, match="--shards is 999, but there are [0-9]+ pairs of 32 tokens; use fewer"):
        prepare(tmp_path / "out", shards=999)
    assert not (tmp_path / "out").exists()
