"""All-to-alls of tokens that the planner predicts are those of the engine, with DeepSpeed's AutoEP."""

import pytest

from ds_lgamp.planner.cluster import Cluster, Link
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.work import Work
from testing.ranks import run_on_ranks
from tests.planner.test_memory_measured import config_of
from tests.planner.training import LAYERS, STEPS, Case, exchanges_on_rank, model_of

PERFECT = {"matmul": 1.0, "memory": 1.0, "inside": 1.0, "between": 1.0, "crowding": 0.0}
MODEL = model_of("DeepSeek-V3")


def costs(of, bandwidth):
    inside = Link(bandwidth, 1e-30)
    return Work(MODEL, Cluster("here", 1, 2, 1e12, 1e12, 1e12, inside, inside, efficiency=PERFECT), of).costs()


def predicted_bytes(of):
    """A network of a byte per second takes as many seconds longer than a fast one as there are bytes."""
    slow, fast = costs(of, 1.0), costs(of, 1e30)
    recomputed = [chunk in of.spec.recomputed_chunks for chunk in range(of.chunks)]
    passes = [(slow.forward, fast.forward), (slow.backward, fast.backward)]
    sent = sum(sum(longer) - sum(shorter) for longer, shorter in passes)
    again = zip(slow.recompute, fast.recompute, recomputed)
    return of.micro_batches * (sent + sum((longer - shorter) * counts for longer, shorter, counts in again))


@pytest.mark.slow
def test_layers_with_experts_exchange_as_often_and_as_much_as_predicted():
    """Three of four layers have experts. Two ranks that divide them send half of all visits to each other, and what
    one of them sends less, the other one sends more."""
    plans = [
        Configuration(2, 1, 1, 4, 4, 3, "layered", LAYERS, recompute=recompute, expert_ranks=2)
        for recompute in ("none", "full")
    ]
    cases = [(case, config_of(case)) for case in (Case("DeepSeek-V3", of, True) for of in plans)]
    on_ranks = run_on_ranks(2, exchanges_on_rank, cases, seconds=600)
    # The last chunk is not recomputed, because its backwards follow at once.
    for of, rounds, seen in zip(plans, (3 * 4, 3 * 4 + 2 * 2), zip(*on_ranks)):
        assert {calls for calls, _ in seen} == {STEPS * of.micro_batches * rounds}
        sent = sum(size for _, size in seen) / 2 / STEPS
        assert sent == pytest.approx(predicted_bytes(of), rel=0.01)
