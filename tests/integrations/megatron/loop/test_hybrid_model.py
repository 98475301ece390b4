"""Chunks of a HybridModel, which a pattern of its layers cuts, train as the model does in one process."""

from argparse import Namespace

import pytest

pytest.importorskip("megatron.core.models.hybrid", reason="Megatron-core has no HybridModel before release 0.18")

from ds_lgamp.config import ConfigError, LgampConfig
from ds_lgamp.integrations.megatron.loop.arguments import Job
from ds_lgamp.integrations.megatron.loop.install import install_schedules, uninstall
from testing.ranks import run_on_ranks
from tests.integrations.megatron.training_loop import STOCK, Place, assert_trained_alike, prepare_process, train_all

MAMBA = (("mamba_num_groups", 2), ("mamba_head_dim", 32), ("mamba_state_dim", 8))
PLACES = {
    "one rank": Place(1, 4, "layered", model="HybridModel", options=MAMBA),
    "pipeline": Place(2, 2, "layered", model="HybridModel", options=MAMBA),
    "stage 3": Place(2, 2, "layered", model="HybridModel", zero_stage=3, tied=False, options=MAMBA),
    "one chunk per rank": Place(2, 1, "1f1b", model="HybridModel", tied=False, options=MAMBA),
}


@pytest.fixture(scope="module")
def trained():
    found = {}
    for where in PLACES.values():
        for place in (where, alone(where)):
            if place not in found:
                found[place] = run_on_ranks(place.ranks, train_all, [place], before_init=prepare_process)[0][place]
    return found


def alone(where):
    return where._replace(pipeline_ranks=1, chunks_per_rank=1, schedule=STOCK, zero_stage=0)


@pytest.mark.parametrize("name", PLACES)
def test_chunks_train_as_the_model_in_one_process(trained, name):
    assert_trained_alike(trained[PLACES[name]], trained[alone(PLACES[name])], 1e-5)


@pytest.mark.parametrize(
    ("pattern", "stage", "words"),
    [
        ("*-|*-|*-", 0, "hybrid_layer_pattern is .*, which has 3 parts for 2 chunks; write '|'"),
        ("*-*-", 0, "which has 1 parts for 2 chunks"),
        ("*-|*-", None, "pass it vp_stage"),
    ],
)
def test_a_pattern_that_would_leave_out_layers_is_refused(pattern, stage, words):
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    config = Namespace(pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=2)
    install_schedules(Job(LgampConfig(), 0, {}))
    try:
        with pytest.raises(ConfigError, match=words.replace("|", "[|]")):
            HybridModel(config, None, 8, 8, hybrid_layer_pattern=pattern, vp_stage=stage)
    finally:
        uninstall()
