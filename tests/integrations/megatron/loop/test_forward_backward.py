"""Megatron-core trains with the programs of ds_lgamp as with its own schedules."""

from collections import Counter
from itertools import groupby

import pytest

from testing.ranks import run_on_ranks
from tests.integrations.megatron.training_loop import STOCK, Place, prepare_process, train_all
from tests.slow import chosen, slow_except

ALONE = {
    "": Place(1, 1, STOCK),
    "untied": Place(1, 1, STOCK, tied=False),
    "per token": Place(1, 1, STOCK, per_token=True),
    "lengths": Place(1, 1, STOCK, lengths=True),
    "ramp-up": Place(1, 1, STOCK, micro_batches=(2, 4, 8)),
    "seven layers": Place(1, 1, STOCK, layout="EtttttttL"),
    "BERT": Place(1, 1, STOCK, model="BertModel"),
    "untied BERT": Place(1, 1, STOCK, model="BertModel", tied=False),
    "T5": Place(1, 1, STOCK, model="T5Model"),
}
"""One process without parallelism, with Megatron-core's own loop."""

PLACES = {
    "": [
        Place(1, 4, "layered"),
        Place(2, 4, "layered"),
        Place(2, 4, "layered", group=3),
        Place(2, 4, "interleaved_1f1b"),
        Place(2, 1, "1f1b"),
        Place(2, 1, "gpipe"),
        Place(1, 4, "layered", data_ranks=2, distributed_optimizer=True),
        Place(1, 4, "layered", data_ranks=2),
        Place(1, 4, "layered", tensor_ranks=2),
        Place(2, 2, "layered", data_ranks=2, distributed_optimizer=True),
        Place(2, 2, "layered", data_ranks=2, distributed_optimizer=True, aligned=False),
        Place(2, 2, "layered", tensor_ranks=2),
    ],
    "untied": [Place(1, 8, "layered", tied=False), Place(2, 4, "layered", tied=False)],
    "per token": [
        Place(2, 4, "layered", per_token=True),
        Place(1, 4, "layered", data_ranks=2, distributed_optimizer=True, per_token=True),
    ],
    "lengths": [Place(2, 4, "layered", lengths=True)],
    "ramp-up": [Place(2, 2, "layered", micro_batches=(2, 4, 8))],
    "BERT": [
        Place(1, 4, "layered", model="BertModel"),
        Place(1, 4, "layered", model="BertModel", data_ranks=2, distributed_optimizer=True),
        Place(2, 2, "layered", model="BertModel"),
    ],
    "untied BERT": [Place(1, 4, "layered", model="BertModel", tied=False)],
    "T5": [Place(1, 1, "layered", model="T5Model")],
    "seven layers": [Place(1, 3, "layered", layout="Ettt|tt|ttL"), Place(2, 2, "layered", layout="Ett|tt|tt|tL")],
}

DROPOUT = (("hidden_dropout", 0.1), ("attention_dropout", 0.1))
ONE_CHUNK, SEVERAL = Place(2, 1, "1f1b", options=DROPOUT), Place(1, 4, "layered", options=DROPOUT)
DRAWING = [ONE_CHUNK, ONE_CHUNK._replace(schedule=STOCK), SEVERAL, SEVERAL._replace(schedule=STOCK, chunks_per_rank=1)]
"""Places with dropout."""

ORACLES = [Place(2, 4, STOCK), Place(2, 1, STOCK), Place(2, 2, STOCK, data_ranks=2, distributed_optimizer=True)]
"""Megatron-core's own schedules, whose losses must match exactly. Groups of the interleaved one have all
micro-batches."""


DEFAULT = [PLACES[""][1], PLACES[""][9], PLACES["untied"][0], PLACES["lengths"][0], PLACES["seven layers"][1]]
"""Places that are not slow."""


@pytest.fixture(scope="module")
def trained(request):
    results = {}
    alone = {ALONE[kind] for kind in chosen(request, "kind")}
    drawing = {place for places in chosen(request, "drawing") for place in places}
    places = alone | drawing | chosen(request, "place", "oracle")
    for ranks in (1, 2, 4):
        members = [place for place in places if place.ranks == ranks]
        on_ranks = run_on_ranks(ranks, train_all, members, before_init=prepare_process)
        results |= {place: [found[place] for found in on_ranks] for place in members}
    return results


def losses_and_norms(steps):
    return [(step.loss, step.norm) for step in steps]


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        case if case[1] in DEFAULT else pytest.param(*case, marks=pytest.mark.slow)
        for case in ((kind, place) for kind, members in PLACES.items() for place in members)
    ],
)
def test_losses_and_norms_are_those_of_one_process(trained, kind, place):
    alone = losses_and_norms(trained[ALONE[kind]][0])
    for steps in trained[place]:
        assert losses_and_norms(steps) == [pytest.approx(step, rel=1e-5) for step in alone]
    assert alone[0] != alone[-1]


@pytest.mark.parametrize(
    ("place", "oracle"),
    [
        pytest.param(place, oracle, marks=() if place in DEFAULT else pytest.mark.slow)
        for oracle in ORACLES
        for place in PLACES[""]
        if place == oracle._replace(schedule=place.schedule)
    ],
)
def test_losses_are_to_the_digit_those_of_megatrons_own_schedules(trained, place, oracle):
    assert losses_and_norms(trained[place][0]) == losses_and_norms(trained[oracle][0])


@pytest.mark.slow
@pytest.mark.parametrize("drawing", [pytest.param(tuple(DRAWING), id="dropout")])
def test_dropout_draws_what_megatrons_own_schedule_draws_where_a_rank_has_one_chunk(trained, drawing):
    ours, stock, of_several, of_one = (losses_and_norms(trained[place][0]) for place in drawing)
    assert ours == stock
    # The order of passes differs.
    assert of_several[0] != of_one[0]
    assert of_several[0] == pytest.approx(of_one[0], rel=0.1)


SHARDED = [place for place in (*PLACES[""], *PLACES["BERT"]) if place.distributed_optimizer]


@pytest.mark.parametrize("place", slow_except(DEFAULT, SHARDED))
def test_zero_1_reduces_a_chunk_once_after_the_next_and_gathers_it_once_before_its_use(trained, place):
    for rank, steps in enumerate(trained[place]):
        # In the first chunk, an embedding whose gradient is summed over two pipeline ranks has its own bucket.
        buckets = place.chunks_per_rank + (place.pipeline_ranks > 1 and rank < place.data_ranks)
        for step in steps[1:]:
            counted = Counter(kind for kind, _ in step.log)
            assert counted["reduce_scatter"] == counted["all_gather"] == buckets
        if place.aligned:
            assert order_of_chunks(steps[-1].log) == expected_order(place.chunks_per_rank)


def order_of_chunks(log):
    """Returns when a rank begins the forwards and ends the backwards of every chunk, and the collectives of the
    distributed optimizer between them. Forwards and backwards alternate at the turn."""
    names = {"forward": "F{}", "backward": "B{}", "all_gather": "gather", "reduce_scatter": "reduce"}
    events = [names[kind].format(number) for kind, number in log if kind in names]
    kept = [
        event
        for index, event in enumerate(events)
        if not (event[0] == "F" and event in events[:index]) and not (event[0] == "B" and event in events[index + 1 :])
    ]
    return [event for event, _ in groupby(kept)]


def expected_order(chunks):
    """Returns the expected events. A chunk is gathered while the one before it runs. Neighbouring events with the same
    name count as one."""
    forward = [f"F{chunk}" for chunk in range(chunks)]
    for number in range(chunks - 2):
        forward.insert(1 + 2 * number, "gather")
    backward = [event for chunk in reversed(range(chunks)) for event in (f"B{chunk}", "reduce")]
    return ["gather", *forward, *backward]
