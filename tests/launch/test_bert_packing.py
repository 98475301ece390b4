"""Pairs that share rows: which ones, and that a model learns from them what it learns from each alone."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from testing.ranks import run_on_ranks
from tests.launch.packed import (
    LENGTH,
    ROWS,
    make,
    micro_batch_of,
    one_by_one,
    rows_of,
    script_module,
    train_alone,
    train_on_rank,
)

PRECISION = 1e-6
"""Relative, of losses and of each tensor's gradient."""


class Lengths:
    """Shards of pairs that are known by their lengths alone."""

    def __init__(self, tokens):
        self._tokens, self.opened = tokens, set()

    def __len__(self):
        return len(self._tokens)

    @property
    def rows(self):
        return [len(each) for each in self._tokens]

    def tokens(self, shard):
        self.opened.add(shard)
        return np.array(self._tokens[shard])


def packing():
    return script_module("bert_packing")


LENGTHS = st.lists(st.integers(5, 64), min_size=1, max_size=60)
SHARDS = st.lists(LENGTHS, min_size=1, max_size=5).map(Lengths)


@given(LENGTHS)
def test_every_pair_joins_the_first_row_with_room_and_a_free_place(tokens):
    places, expected = packing().places(64), []
    for number, own in enumerate(tokens):
        free = (row for row in expected if len(row) < places and sum(tokens[n] for n in row) + own <= 64)
        row = next(free, None)
        if row is None:
            expected.append([number])
        else:
            row.append(number)
    assert packing().first_fit(tokens, 64) == expected


def test_windows_are_packed_by_themselves():
    window = packing().WINDOW
    first, second = packing().windows([40] * (window - 1) + [5] + [24] * window, 64)
    assert first == [[0, window - 1], *([n] for n in range(1, window - 1))]
    assert second == [[n, n + 1] for n in range(window, 2 * window, 2)]


def test_early_rows_of_an_epoch_hold_as_many_pairs_as_late_ones():
    tokens = np.random.default_rng(0).integers(5, 64, 500).tolist()
    rows = packing().rows_of_shard(Lengths([tokens]), 0, 0, 64)
    numbers = [len(row) for row in itertools.takewhile(lambda row: row[0].epoch == 0, rows)]
    early, late = np.array_split(numbers, 2)
    assert early.mean() == pytest.approx(late.mean(), rel=0.1)


@settings(max_examples=50)
@given(SHARDS, st.integers(1, 6), st.integers(1, 3), st.integers(0, 3))
def test_any_number_of_ranks_sees_the_same_rows_in_every_batch_from_any_step_on(shards, ranks, batch, seed):
    size, steps = batch * ranks, 8

    def batches(ranks, first=0):
        """Returns the rows of every step after ``first`` ones."""
        own = [packing().rows_of_rank(shards, seed, 64, rank, ranks, first * size) for rank in range(ranks)]
        return [{tuple(next(rows)) for rows in own for _ in range(size // ranks)} for _ in range(steps - first)]

    alone = batches(1)
    assert batches(ranks) == alone
    assert batches(ranks, first=3) == alone[3:]


@settings(max_examples=50)
@given(LENGTHS, st.integers(0, 3))
def test_an_epoch_has_every_pair_once_and_the_next_one_has_another_order(tokens, seed):
    stream = itertools.chain.from_iterable(packing().rows_of_shard(Lengths([tokens]), 0, seed, 64))
    seen = list(itertools.islice(stream, 2 * len(tokens)))
    for epoch, half in enumerate((seen[: len(tokens)], seen[len(tokens) :])):
        assert {pair.epoch for pair in half} == {epoch}
        assert {pair.row for pair in half} == set(range(len(tokens)))


def test_the_next_epoch_packs_other_pairs_together():
    tokens = np.random.default_rng(0).integers(5, 64, 60).tolist()
    seen = list(itertools.islice(packing().rows_of_shard(Lengths([tokens]), 0, 0, 64), 120))
    first, second = ({tuple(p.row for p in row) for row in seen if row[0].epoch == epoch} for epoch in (0, 1))
    assert first and second and len(first & second) < len(first) / 2


@pytest.mark.parametrize(("shards", "ranks"), [(4, 2), (6, 4), (3, 3), (2, 3)])
def test_a_rank_reads_only_its_own_shards(shards, ranks):
    for rank in range(ranks):
        lengths = Lengths([[20, 30, 40]] * shards)
        list(itertools.islice(packing().rows_of_rank(lengths, 0, 64, rank, ranks), 4 * shards))
        assert lengths.opened == set(script_module("bert_data").shards_of_rank(shards, rank, ranks))


@pytest.mark.parametrize("number", [0, 1])
def test_a_row_has_its_pairs_one_after_another_and_ignores_what_is_left(number):
    for pairs, tokens in zip(rows_of(0, 0, number), ROWS[number]):
        row = packing().packed(pairs, LENGTH, padding=7)
        start = 0
        for pair, own in zip(pairs, tokens):
            for name in ("input_ids", "token_type_ids", "labels"):
                assert torch.equal(row[name][start : start + own], pair[name][:own])
            assert row["position_ids"][start : start + own].tolist() == list(range(own))
            start += own
        rest = LENGTH - start
        assert row["input_ids"][start:].tolist() == [7] * rest
        assert row["position_ids"][start:].tolist() == list(range(rest))
        assert row["labels"][start:].tolist() == [-100] * rest
        labels = [pair["next_sentence_label"] for pair in pairs]
        assert row["next_sentence_label"].tolist() == [*labels, *[-100] * (LENGTH // 16 - len(pairs))]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_losses_and_gradients_of_packed_rows_are_those_of_their_pairs_one_by_one(attention, number):
    rows = rows_of(0, 0, number)
    alone, packed = (make(kind, attn_implementation=attention).double() for kind in (False, True))
    wanted, batch = one_by_one(alone, rows), micro_batch_of(rows)
    sum(wanted).backward()
    output = packed(**batch)
    output.loss.backward()
    scores, pair_scores = output.prediction_logits, output.seq_relationship_logits
    assert cross_entropy(scores.flatten(0, 1), batch["labels"].flatten()).item() == near(wanted.tokens)
    assert cross_entropy(pair_scores.flatten(0, 1), batch["next_sentence_label"].flatten()).item() == near(wanted.pairs)
    assert output.loss.item() == near(sum(wanted))
    assert_equal(gradients_of(packed), gradients_of(alone))


def near(wanted):
    return pytest.approx(wanted.item(), rel=PRECISION)


def gradients_of(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_equal(gradients, wanted):
    assert gradients.keys() == wanted.keys()
    everything = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    for name, gradient in gradients.items():
        # The gradient of a key's bias is zero but for rounding, because the softmax does not depend on it.
        assert (gradient - wanted[name]).norm() <= PRECISION * wanted[name].norm() + 1e-8 * everything, name


@pytest.mark.slow
def test_packed_rows_through_pipelines_at_stage_2_train_as_their_pairs_one_by_one():
    losses, wanted = train_alone(4)
    courses = run_on_ranks(4, train_on_rank, 2, {"pipeline_ranks": 2})
    assert [course.losses[0] for course in courses] == pytest.approx(losses, rel=PRECISION)
    assert_equal({name: each for course in courses for name, each in course.gradients[0].items()}, wanted)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [({"attn_implementation": "flex_attention"}, "flex_attention"), ({"is_decoder": True}, "causal")],
)
def test_a_model_whose_attention_takes_no_mask_is_refused(settings, kind):
    with pytest.raises(SystemExit, match=f"attention takes any mask, and this one's is {kind}; use an encoder with"):
        make(True, **settings)


@pytest.mark.parametrize(("shards", "packed"), [(1, "3 rows, 12.5% padding"), (2, "4 rows, 34.4% padding")])
def test_the_preparation_says_what_packing_saves_within_shards(shards, packed):
    said = script_module("bert_pairs")._padding([64, 32, 32, 40], 64, shards)
    assert said == f"4 pairs of 64 tokens, 34.4% of them padding (packed: {packed})"
