"""A checkpoint written at any layout loads at any other, and training continues as if uninterrupted."""

from itertools import product
from typing import NamedTuple

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator

import ds_lgamp
from ds_lgamp.checkpoint.ranges import weights
from ds_lgamp.checkpoint.whole import read_whole
from ds_lgamp.partition.agreement import everyone
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.models import Training, decay_groups, pipeline_module, warmup_factors
from tests.pairwise import pairwise
from tests.runtime.models import micro_batch
from tests.slow import chosen

GLOBAL_BATCH = 4
"""Micro-batches of all data-parallel ranks."""
SAVED, RESUMED = 3, 2
SAMPLES = [sample for index in range(4 * GLOBAL_BATCH) for sample in zip(*micro_batch(0, index))]
"""The engine's own data. They start again after 4 steps."""
TRAINING = Training(blocks=6, tied=True, steps=SAVED + RESUMED, clipping=0.3, warmup=5, decay=0.01)


class Place(NamedTuple):
    """A layout: pipeline ranks, data-parallel ranks, ZeRO stage, block and type."""

    pipeline_ranks: int
    data_ranks: int
    stage: int
    block: dict
    data_type: str = "fp32"
    zero: dict = {}
    """More keys of zero_optimization."""

    @property
    def ranks(self) -> int:
        return self.pipeline_ranks * self.data_ranks


PLACES = {
    "alone": Place(1, 1, 0, {}),
    "zero 3": Place(1, 2, 3, {"layers_per_chunk": 1}),
    "zero 2, interleaved": Place(2, 1, 2, {"schedule": "interleaved_1f1b", "chunks_per_rank": 2}),
    "bf16": Place(2, 1, 3, {}, "bf16"),
    "fp16": Place(1, 2, 1, {"layers_per_chunk": 3}, "fp16"),
    "zero 3, modular": Place(2, 2, 3, {"layers_per_chunk": 1, "resident_chunks": 1, "micro_batch_group": 1}),
    "zero 1, 1f1b": Place(4, 1, 1, {"schedule": "1f1b"}),
    "zero 0, contiguous": Place(2, 2, 0, {"layers_per_chunk": 2, "placement": "contiguous", "recompute": "none"}),
    "zero 2, wide": Place(1, 4, 2, {}),
    "refreshed shards": Place(1, 4, 3, {}, zero={"zero_hpz_partition_size": 2}),
    "replicated shards": Place(1, 4, 3, {"layers_per_chunk": 1}, zero={"mics_shard_size": 2}),
    "zero 2, by speed": Place(2, 2, 2, {"pipeline_rank_speeds": [2, 1], "data_rank_speeds": [3, 1]}),
    "zero 3, eight": Place(4, 2, 3, {}),
}
PAIRS = [
    (source, target)
    for source, target in product(PLACES, PLACES)
    # Eight ranks take long on this machine.
    if (target != "zero 3, eight" or source in ("alone", "bf16", "zero 0, contiguous", "zero 3, eight"))
    and ("zero 2, by speed" not in (source, target) or "zero 3, modular" in (source, target))
]
"""Places that write and places that load."""
FP32_PAIRS = [pair for pair in PAIRS if all(PLACES[name].data_type == "fp32" for name in pair)]


def engine_of(place: Place):
    ds_lgamp.install()
    with quiet():
        module = pipeline_module(TRAINING, place.pipeline_ranks)
        groups = decay_groups(module.parameters(), TRAINING.decay)
        # A small eps would amplify every rounding error.
        optimizer = torch.optim.AdamW(groups, lr=0.02, eps=1e-4)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": GLOBAL_BATCH // place.data_ranks,
            "gradient_clipping": TRAINING.clipping,
            "zero_optimization": {"stage": place.stage, **place.zero},
            "ds_lgamp": place.block,
        }
        if place.data_type == "bf16":
            config["bf16"] = {"enabled": True}
        if place.data_type == "fp16":
            config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
        return deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_factors(TRAINING.warmup)),
            training_data=SAMPLES,
            config=config,
        )[0]


def steps(engine, count):
    """Trains. Returns loss, norm and learning rate of every step."""
    results = []
    for _ in range(count):
        loss = engine.train_batch().item()
        results.append((loss, float(engine.get_global_grad_norm()), engine.get_lr()[0]))
    return results


def save_and_go_on(folder, names):
    """Returns the further steps of the runs that save, and the number of parameter elements that each rank wrote."""
    _prepare()
    expected = {}
    for name in names:
        engine = engine_of(PLACES[name])
        steps(engine, SAVED)
        client_state = {"seen": name, "rank": (engine.stage_id, engine.grid.data_parallel_id)}
        engine.save_checkpoint(folder, tag=name, client_state=client_state)
        written = everyone(sum(shard.values.numel() for shard in weights(engine.optimizer.partition).values()))
        expected[name] = steps(engine, RESUMED), written
        engine.wait_for_checkpoint()
    return expected


def load_and_go_on(folder, pairs, names):
    """Loads checkpoints at each place and writes them again. Returns the steps after each load."""
    _prepare()
    resumed = {}
    for name in names:
        engine = engine_of(PLACES[name])
        steps(engine, 1)
        # At stages 1 and 2 this makes the weights complete. A load must replace them, because no gather would follow.
        engine.eval_batch(iter([micro_batch(9, index) for index in range(engine.micro_batches)]))
        for source in (source for source, target in pairs if target == name):
            _, client_state = engine.load_checkpoint(folder, tag=source)
            there = PLACES[source]
            rank = engine.stage_id % there.pipeline_ranks, engine.grid.data_parallel_id % there.data_ranks
            assert client_state == {"seen": source, "rank": rank} and engine.global_steps == SAVED
            engine.save_checkpoint(folder, tag=f"{source} at {name}", client_state=client_state, save_latest=False)
            resumed[source, name] = steps(engine, RESUMED if (source, name) in FP32_PAIRS else 1)
        engine.wait_for_checkpoint()
    return resumed


def _prepare():
    prepare_rank()
    # torch computes fp16 on any CPU, but DeepSpeed does not detect that everywhere.
    get_accelerator().is_fp16_supported = lambda: True


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


DEFAULT = ("alone", "zero 2, interleaved", "zero 3, modular")
"""Places that are not slow."""


def factors(pair):
    """Returns what may matter of both places."""
    described = {"end": pair}
    for end, place in zip(("source", "target"), (PLACES[name] for name in pair)):
        schedule = place.block.get("schedule", "layered")
        described |= {f"{end} stage": place.stage, f"{end} schedule": schedule, f"{end} type": place.data_type}
        described |= {f"{end} has a pipeline": place.pipeline_ranks > 1, f"{end} has replicas": place.data_ranks > 1}
        described |= {f"{end} groups": tuple(place.zero)}
    return described


def covering():
    """Returns pairs of places that hold every pair of factors. Every place is in some."""
    described = [factors(pair) for pair in PAIRS]
    ends = [case.pop("end") for case in described]
    found = {ends[described.index(case)] for case in pairwise(described)}
    found |= {pair for pair in PAIRS if "zero 2, by speed" in pair}
    sources, targets = map(set, zip(*found))
    found |= {(name, "alone") for name in PLACES.keys() - sources} | {
        ("alone", name) for name in PLACES.keys() - targets
    }
    return found | {("fp16", "fp16"), ("fp16", "alone")}


COVERING = covering()


def by_speed(pairs):
    """Returns ``pairs`` as parameters. Those that cover the factors are slow, the others are in the full product."""
    rest = [pair for pair in pairs if not {*pair} <= {*DEFAULT}]
    slow = [pytest.param(*pair, marks=pytest.mark.slow) for pair in rest if pair in COVERING]
    full = [pytest.param(*pair, marks=pytest.mark.full) for pair in rest if pair not in COVERING]
    return [*(pair for pair in pairs if pair not in rest), *slow, *full]


def at_places(names, function, *arguments):
    results: dict = {}
    for ranks in sorted({PLACES[name].ranks for name in names}):
        members = [name for name in PLACES if name in names and PLACES[name].ranks == ranks]
        results |= run_on_ranks(ranks, function, *arguments, members)[0]
    return results


@pytest.fixture(scope="module")
def expected(request, folder):
    return at_places(chosen(request, "source"), save_and_go_on, str(folder))


@pytest.fixture(scope="module")
def resumed(request, folder, expected):
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    pairs = {(call["source"], call["target"]) for call in (item.callspec.params for item in items)}
    return at_places({target for _, target in pairs}, load_and_go_on, str(folder), sorted(pairs))


@pytest.mark.parametrize(("source", "target"), by_speed(FP32_PAIRS))
def test_training_goes_on_at_another_layout(expected, resumed, source, target):
    for goes_on, went_on in zip(resumed[source, target], expected[source][0]):
        assert goes_on == pytest.approx(went_on, rel=1e-6)


@pytest.mark.parametrize(("source", "target"), by_speed(PAIRS))
def test_what_is_loaded_is_what_was_written_to_the_bit(folder, resumed, source, target):
    written, loaded = read_whole(folder / source), read_whole(folder / f"{source} at {target}")
    assert written.parameters.keys() == loaded.parameters.keys()
    for name, values in written.parameters.items():
        assert torch.equal(values, loaded.parameters[name]), name
    assert written.moments.keys() == {"exp_avg", "exp_avg_sq"} == loaded.moments.keys()
    for key, moments in written.moments.items():
        assert moments.keys() == written.parameters.keys() == loaded.moments[key].keys()
        for name, values in moments.items():
            assert torch.equal(values, loaded.moments[key][name]), (key, name)
    for key in ("parameters", "lr_scheduler"):
        assert written.state[key] == loaded.state[key], key
    scalars = [[group["step"] for group in whole.state["optimizer"]["scalars"]] for whole in (written, loaded)]
    assert scalars[0] == scalars[1] == [SAVED] * 3


@pytest.mark.slow
def test_half_precision_trains_on_close_to_where_it_was(expected, resumed):
    for (source, target), (first, *_) in resumed.items():
        assert first[0] == pytest.approx(expected[source][0][0][0], rel=0.02), (source, target)


@pytest.mark.slow
def test_the_loss_scale_moves_with_the_run(folder, expected, resumed):
    scaler = read_whole(folder / "fp16").state["loss_scaler"]
    assert scaler["cur_scale"] == 2**9
    assert read_whole(folder / "fp16 at fp16").state["loss_scaler"] == scaler
    assert read_whole(folder / "fp16 at alone").state["loss_scaler"] is None


def test_every_element_is_written_by_one_rank(folder, expected):
    """At stage 0 all data-parallel ranks hold every element. Several pipeline ranks hold a tied module."""
    elements = sum(values.numel() for values in read_whole(folder / "alone").parameters.values())
    for name, (_, written) in expected.items():
        assert sum(written) == elements and all(written), name
