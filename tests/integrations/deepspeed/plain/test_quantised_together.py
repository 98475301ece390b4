"""Packed bytes beside settings that round, offload, keep or publish weights: layers compute with exactly the bytes that
bitsandbytes stored, and train as on one process."""

import pytest
import torch
import torch.distributed as dist

import ds_lgamp
from ds_lgamp.integrations.user_script import finish_engines
from ds_lgamp.partition.quantised import is_packed
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain import quantised
from tests.integrations.deepspeed.plain.quantised import Case

pytest.importorskip("bitsandbytes")

STEPS = 3
SPREAD = {"keep_frozen": "none"}
ROUNDED = {"zero_quantized_weights": True, "zero_quantized_nontrainable_weights": True}
OPTIMIZER = {"offload_optimizer": {"device": "cpu"}}
EVERYTHING = {**OPTIMIZER, "offload_param": {"device": "cpu"}}
IN_BF16 = "fp4 stored in bf16"


def packed_weights(model):
    """Yields the names, modules and parameters of the packed weights of ``model``."""
    for path, part in model.named_modules():
        for key, parameter in part._parameters.items():
            if parameter is not None and is_packed(parameter):
                yield f"{path}.{key}", part, parameter


def as_bytes(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def compared(engine, case):
    """Compares, from now on, the bytes of every packed weight with those that bitsandbytes stored whenever its layer
    computes. Returns a list that grows with the names of those that were equal."""
    stored = {name: as_bytes(each).clone() for name, _, each in packed_weights(quantised.quantised(case))}
    seen = []

    def compare(name, parameter):
        assert torch.equal(as_bytes(parameter), stored[name]), f"{case}: {name}"
        seen.append(name)

    for name, part, parameter in packed_weights(engine.module):
        # The parameter is that of the layer: the engine refuses another one.
        part.register_forward_pre_hook(lambda _part, _inputs, name=name, its=parameter: compare(name, its))
        part.register_full_backward_hook(lambda _part, _of, _by, name=name, its=parameter: compare(name, its))
    return seen


def computes_with_stored_bytes(case):
    """Returns losses and norms of a run in which every layer computes with the bytes that bitsandbytes stored."""
    engine = quantised.engine_of(case)
    # Bytes that are stored in the precision of the run share a unit with other frozen weights.
    units = [
        unit
        for unit in engine.optimizer.partition.units
        if any(is_packed(each.parameter) for each in unit.storage.parameters)
    ]
    assert units and all(unit.policy.bits_of_weights is None for unit in units), case
    seen = compared(engine, case)
    losses, norms = quantised.train(engine, range(STEPS))
    # Other pipeline ranks compute with the others.
    own = {id(each.parameter) for unit in units for each in unit.storage.parameters}
    assert set(seen) == {name for name, _, each in packed_weights(engine.module) if id(each) in own}, case
    finish_engines()
    engine.destroy()
    return losses, norms


def run_rounded(cases):
    prepare_rank()
    for case in cases:
        losses, _ = computes_with_stored_bytes(case)
        expected, _, _ = quantised.reference(case, dist.get_world_size(), STEPS)
        # The other weights are rounded.
        assert losses != expected and losses == pytest.approx(expected, rel=2e-2), case


def run_exact(cases):
    prepare_rank()
    for case in cases:
        losses, norms = computes_with_stored_bytes(case)
        expected_losses, expected_norms, _ = quantised.reference(case, dist.get_world_size(), STEPS)
        tolerance = 1e-6 if case.precision == "fp32" else 1e-2
        assert losses == pytest.approx(expected_losses, rel=tolerance), case
        assert norms == pytest.approx(expected_norms, rel=tolerance), case


def rounded_cases():
    for block in (SPREAD, {**SPREAD, "regather": "host"}):
        for zero in (ROUNDED, {**ROUNDED, **EVERYTHING}):
            yield Case("nf4 twice", 1, 3, block, zero=zero)
            yield Case(IN_BF16, 1, 3, block, "bf16", zero=zero)
    yield Case("8 bits", 1, 3, SPREAD, zero=ROUNDED)


def test_weights_that_travel_rounded_leave_packed_bytes_as_they_are():
    run_on_ranks(2, run_rounded, list(rounded_cases())[:2])


@pytest.mark.slow
def test_every_kind_of_packed_bytes_beside_weights_that_travel_rounded():
    run_on_ranks(2, run_rounded, list(rounded_cases())[2:], seconds=600)


HOST = [
    Case("nf4 twice", 1, 3, {**SPREAD, "regather": "host"}),
    Case("nf4 twice", 1, 3, SPREAD, zero=EVERYTHING),
    Case("8 bits", 1, 3, {**SPREAD, "regather": "host"}, zero=EVERYTHING),
    Case("8 bits", 1, 3, {"keep_frozen": "host"}, zero=OPTIMIZER),
    Case(IN_BF16, 1, 3, {**SPREAD, "regather": "host"}, "bf16", zero=EVERYTHING),
    Case("nf4", 1, 2, {}, zero=OPTIMIZER),
    Case("8 bits", 2, 3, {}, zero=EVERYTHING),
    Case("nf4 twice", 2, 3, {}, zero=OPTIMIZER),
    Case("nf4", 2, 1, {}, zero=OPTIMIZER),
]


@pytest.mark.slow
def test_packed_bytes_on_the_host_train_as_on_one_process():
    run_on_ranks(2, run_exact, HOST, seconds=600)


def goes_on_from_live_state(folder, case):
    prepare_rank()
    ds_lgamp.install()
    case = case._replace(block={**case.block, "live_checkpoint": str(folder / "live")})
    first = quantised.engine_of(case)
    quantised.train(first, range(2))
    finish_engines()
    # The other model has other bytes and constants: those of the run come back with its adapters.
    second = quantised.engine_of(case, quantised.quantised(case._replace(seed=5)))
    second.load_checkpoint(str(folder / "checkpoints"))
    assert second.global_steps == 2
    seen = compared(second, case)
    losses, norms = quantised.train(second, range(2, 3))
    expected_losses, expected_norms, _ = quantised.reference(case, dist.get_world_size(), STEPS)
    assert seen
    assert losses == pytest.approx(expected_losses[2:], rel=1e-5)
    assert norms == pytest.approx(expected_norms[2:], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "pipeline_ranks", "stage"), [("nf4 twice", 2, 3), ("8 bits", 1, 2)])
def test_a_live_state_goes_on_with_packed_bytes(kind, pipeline_ranks, stage, tmp_path):
    run_on_ranks(2, goes_on_from_live_state, tmp_path, Case(kind, pipeline_ranks, stage))
