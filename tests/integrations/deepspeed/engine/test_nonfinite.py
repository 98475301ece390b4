"""``ds_lgamp.nonfinite``: the name said is that of the number that was spoilt, and a skipped step changes nothing."""

import tempfile

import pytest
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from deepspeed.utils.logging import logger

from ds_lgamp.integrations.deepspeed.engine.nonfinite import NonfiniteError
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine import faulty
from tests.integrations.deepspeed.engine.faulty import Fault, Said
from tests.integrations.deepspeed.engine.test_late_overflow import same, state_of
from tests.integrations.deepspeed.linear import engine_of

MICRO_BATCHES = 3
LAYERED = {"layers_per_chunk": 1}


def adam(parameters):
    """An optimizer that skips a step by itself, on the device."""
    return torch.optim.Adam(parameters, lr=0.01, fused=True)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


HOST = {"offload_optimizer": {"device": "cpu"}}
LAYOUTS = {
    "stage 0": (0, LAYERED, {"optimizer": momentum}),
    "stage 1, clipped": (1, LAYERED, {"optimizer": adam, "gradient_clipping": 0.1}),
    "stage 2, overlapped": (
        2,
        {**LAYERED, "overlap_update": True},
        {"optimizer": momentum, "gradient_clipping": 0.0},
    ),
    "stage 3": (3, LAYERED, {"optimizer": adam}),
    "stage 3, everything kept, reproducible": (
        3,
        {**LAYERED, "recompute": "none", "reproducible": True},
        {"optimizer": momentum},
    ),
    "stage 3, offloaded": (
        3,
        LAYERED,
        {"optimizer": momentum, "gradient_clipping": 0.0, "zero_optimization": {"stage": 3, **HOST}},
    ),
    "1f1b": (1, {"schedule": "1f1b"}, {"optimizer": momentum}),
    "tensor-parallel": (1, LAYERED, {"optimizer": momentum}),
    "in groups": (2, {"schedule": "layered", "chunks_per_rank": 2, "micro_batch_group": 2}, {"optimizer": momentum}),
}
"""ZeRO stage, block and further settings."""
DEFAULT = ["stage 1, clipped", "stage 2, overlapped", "stage 3"]
SLOW = [layout for layout in LAYOUTS if layout not in DEFAULT]

FAULTS = {
    Fault("forward", 2, 1, 1): "in what the forward of layer 2 (Layer) of chunk {chunk} returns for micro-batch 1 of "
    "data-parallel rank 1, on rank",
    Fault("backward", 2, 2, 0): "in what the backward of layer 2 (Layer) of chunk {chunk} returns for micro-batch 2 of "
    "data-parallel rank 0, on rank",
    Fault("weights", 1, 1, 1): "in the gradient of parameter 1.inner.weight, in layer 1 (Layer) of chunk {chunk}, but "
    "in no gradient between layers",
    Fault("inputs", 0, 1, 0): "in the inputs of micro-batch 1 of data-parallel rank 0",
    Fault("labels", 0, 2, 1): "in the labels of micro-batch 2 of data-parallel rank 1",
    Fault("loss", 0, 0, 1): "the loss of micro-batch 0 of data-parallel rank 1, from finite results of all layers",
    Fault("loss backward", 0, 1, 0): "in the gradient of the loss function for micro-batch 1 of data-parallel rank 0",
    Fault("parameter", 3): "in what the forward of layer 3 (Layer) of chunk {chunk} returns for micro-batch 0 of "
    "data-parallel rank 0, whose parameter 3.inner.bias has one in its weights",
}


def engine_with(setting, layout):
    stage, block, settings = LAYOUTS[layout]
    with quiet():
        cut = {"num_stages": 2}
        if layout == "tensor-parallel":
            cut = {"topology": PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=2)}
        module = PipelineModule(
            faulty.specs(), loss_fn=faulty.loss_function, seed_layers=True, seed_fn=torch.manual_seed, **cut
        )
    asked = {} if setting is None else {"nonfinite": setting}
    return engine_of(module, {**block, **asked}, stage, micro_batches=MICRO_BATCHES, **settings)


def step(engine, number, fault=None):
    faulty.current[:] = [] if fault is None else [fault]
    data = faulty.micro_batches(number, engine.grid.data_parallel_id, MICRO_BATCHES)
    return engine.train_batch(iter(data)).item()


def spoil(engine, fault):
    """Spoils a parameter. Returns what repairs it."""
    layer = engine.module._modules.get(str(fault.layer))
    if layer is None:
        return lambda: None
    bias = layer.inner.bias
    before = safe_get_full_fp32_param(bias)
    safe_set_full_fp32_param(bias, torch.full_like(before, float("nan")))
    return lambda: safe_set_full_fp32_param(bias, before)


def state(engine):
    engine.optimizer.partition.catch_up()
    return state_of(engine)


def equal(one, other):
    parts = all(same(*pair) for pair in zip(one[:2], other[:2]))
    return parts and all(same(mine.values(), its.values()) for mine, its in zip(one[2], other[2]) if mine)


def skip_all(layout):
    """Returns for each fault: what was said, whether the step changed nothing, and whether the next one did."""
    engine, said, number, results = engine_with("skip", layout), Said(logger), 0, {}
    for fault in FAULTS:
        healthy = step(engine, number)
        before = state(engine)
        repair = spoil(engine, fault) if fault.kind == "parameter" else lambda: None
        step(engine, number + 1, fault)
        faulty.current.clear()
        repair()
        after = state(engine)
        follows = step(engine, number + 2)
        number += 3
        results[fault] = (said.take(), equal(before, after), torch.tensor([healthy, follows]).isfinite().all().item())
    engine.lgamp.settle_nonfinite()
    logger.removeHandler(said)
    return results, engine.skipped_steps, engine.module.layout


def refused(call):
    try:
        call()
    except NonfiniteError as error:
        return str(error)
    return None


ENDS = {
    "the next step": lambda engine, folder: step(engine, 2),
    "a checkpoint": lambda engine, folder: engine.save_checkpoint(folder),
    "the end": lambda engine, folder: engine.finish_gathers(),
}
ABORTED = {"the next step": "stage 2, overlapped", "a checkpoint": "stage 3", "the end": "stage 3, offloaded"}


def abort(end):
    engine = engine_with("abort", ABORTED[end])
    step(engine, 0)
    step(engine, 1, Fault("forward", 2, 1, 1))
    faulty.current.clear()
    with tempfile.TemporaryDirectory() as folder:
        return refused(lambda: ENDS[end](engine, folder))


def report():
    """Returns what is said of two faults of one layer and one of another, and whether reports change anything."""
    said, runs = Said(logger), []
    for setting in ("report", None):
        engine = engine_with(setting, "stage 1, clipped")
        step(engine, 0)
        after = state(engine)
        for micro_batch, layer in ((0, 1), (1, 1), (1, 3)):
            step(engine, 1, Fault("backward", layer, micro_batch, 0))
        faulty.current.clear()
        engine.lgamp.settle_nonfinite()
        runs.append((after, engine.skipped_steps))
    logger.removeHandler(said)
    return said.take(), equal(runs[0][0], runs[1][0]), [skipped for _, skipped in runs]


def run_default():
    prepare_rank()
    skipped = {layout: skip_all(layout) for layout in DEFAULT}
    return {"skip": skipped, "abort": {end: abort(end) for end in ENDS}, "report": report()}


def run_slow():
    prepare_rank()
    return {layout: skip_all(layout) for layout in SLOW}


@pytest.fixture(scope="module")
def ranks():
    return run_on_ranks(4, run_default)


@pytest.fixture(scope="module")
def slow_ranks():
    return run_on_ranks(4, run_slow)


def check_sentence(results, layout, fault):
    lines = [line for result in results for line in result[0][fault][0]]
    expected = FAULTS[fault].format(chunk=results[0][2].chunk_of(fault.layer))
    if layout == "stage 3, offloaded":
        # The host's weights are not looked at.
        expected = expected.partition(", whose")[0]
    assert len(lines) == 1 and expected in lines[0], lines
    assert lines[0].endswith("the step is skipped") and "\n" not in lines[0]
    if "backward of layer" in lines[0]:
        assert "parameter" not in lines[0], "its own gradients are finite"


def check_bits(results):
    for by_fault, skipped, _ in results:
        assert all(unchanged and healthy for _, unchanged, healthy in by_fault.values())
        assert skipped == len(FAULTS)


@pytest.mark.parametrize("layout", DEFAULT)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind)
def test_one_rank_says_what_was_spoilt(ranks, layout, fault):
    check_sentence([rank["skip"][layout] for rank in ranks], layout, fault)


@pytest.mark.parametrize("layout", DEFAULT)
def test_a_skipped_step_changes_no_bit_and_training_goes_on(ranks, layout):
    check_bits([rank["skip"][layout] for rank in ranks])


@pytest.mark.slow
@pytest.mark.parametrize("layout", SLOW)
def test_at_other_layouts_one_rank_says_what_was_spoilt_and_a_skipped_step_changes_no_bit(slow_ranks, layout):
    results = [rank[layout] for rank in slow_ranks]
    for fault in FAULTS:
        check_sentence(results, layout, fault)
    check_bits(results)


@pytest.mark.parametrize("end", ENDS)
def test_abort_raises_one_sentence_on_all_ranks(ranks, end):
    (sentence,) = {rank["abort"][end] for rank in ranks}
    assert sentence.startswith("step 2 is not finite: the first number that is not finite is in what the forward of")
    assert sentence.endswith("ds_lgamp.nonfinite is 'abort'")


def test_report_says_each_kind_once_and_changes_nothing(ranks):
    lines = [line for rank in ranks for line in rank["report"][0]]
    assert ["layer 1" in line for line in lines].count(True) == 1
    for rank in ranks:
        _, unchanged, skipped = rank["report"]
        assert unchanged and skipped == [0, 0]
