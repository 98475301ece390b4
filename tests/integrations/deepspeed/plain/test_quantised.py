"""QLoRA: adapters beside weights that bitsandbytes has quantised train as on one process with the same model.

Packed bytes are sharded, gathered and kept as stored, and count by their true size.
"""

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ds_lgamp.config import ConfigError
from ds_lgamp.cost.memory import rank_memory
from ds_lgamp.cost.traffic import collective_bytes
from ds_lgamp.cost.units import ElementBytes, Sharding
from ds_lgamp.partition.quantised import constants, is_packed
from ds_lgamp.partition.zero_partition import unit_sizes
from ds_lgamp.runtime.measure import CollectiveCounter
from ds_lgamp.schedule.program import build_program
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain import quantised
from tests.integrations.deepspeed.plain.quantised import QUANTISED, TORCHAO, Case

bitsandbytes = pytest.importorskip("bitsandbytes")

STEPS = 3
NONE = {"keep_frozen": "none"}


def trained_as_one_process(case):
    """Compares losses, norms and adapters with one process. Returns the engine, and the counter of the last step."""
    engine = quantised.engine_of(case)
    losses, norms = quantised.train(engine, range(STEPS - 1))
    with CollectiveCounter() as counter:
        last = quantised.train(engine, range(STEPS - 1, STEPS))
    expected_losses, expected_norms, adapters = quantised.reference(case, dist.get_world_size(), STEPS)
    tolerance = 1e-6 if case.precision == "fp32" else 1e-2
    if case.moments_in_8_bits:
        # Gradients add up in another order, and a moment between two numbers of 8 bits may become either.
        tolerance = 1e-4
    assert losses + last[0] == pytest.approx(expected_losses, rel=tolerance), case
    assert norms + last[1] == pytest.approx(expected_norms, rel=tolerance), case
    if case.precision == "fp32" and not case.moments_in_8_bits:
        state = engine.module.state_dict()
        for name, expected in adapters.items():
            if name in state:
                torch.testing.assert_close(state[name], expected, rtol=1e-5, atol=1e-6, msg=f"{case} {name}")
    return engine, counter


def train_and_count(case):
    """Compares the training with one process, and what it holds and moves with the formulas."""
    engine, counter = trained_as_one_process(case)
    partition, spec = engine.optimizer.partition, engine.program_spec
    actions, size = build_program(spec)[engine.lgamp.placed.stage_id], ElementBytes(optimizer=8)
    home = engine.lgamp.home_of_frozen
    units = unit_sizes(partition, home)
    sharding = Sharding(case.stage, engine.grid.data_parallel_size, spec.hierarchy, all_to_all=True)
    packed = [unit for unit in partition.units if any(is_packed(each.parameter) for each in unit.storage.parameters)]
    assert packed and all(unit.storage.flat.dtype.itemsize == 1 and not unit.trains for unit in packed), case
    expected = sum(collective_bytes(actions, unit, sharding, size) for unit in units)
    # Ranks of a pipeline gather their micro-batches, too, and all ranks the norm.
    small, calls = 64, counter.calls_in(packed[0].policy.data_group)
    counted = sum(sent for kind, sent in calls if sent > small)
    assert counted == expected, (case, counted, expected)
    if case.stage == 3 and home != "none":
        gathers = sum(sent > small and kind == "all_gather" for kind, sent in calls)
        own = sum(engine.grid.data_parallel_size > 1 for unit in units if not unit.frozen)
        assert gathers <= 2 * own, case
    partition.release_all()
    storages = {each.untyped_storage()._cdata: each for unit in partition.units for each in _tensors(unit.storage)}
    told = rank_memory(actions, units, sharding, size)
    assert told.weights == sum(each.untyped_storage().nbytes() for each in storages.values()), case
    engine.destroy()


def _tensors(storage):
    return [storage.flat, storage.shard]


def train_and_count_all(cases):
    prepare_rank()
    for case in cases:
        train_and_count(case)


def test_adapters_beside_packed_weights_train_as_on_one_process():
    run_on_ranks(2, train_and_count_all, [Case("nf4 twice", 2, 3), Case("8 bits", 1, 3, NONE), Case("nf4", 1, 2)])


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_beside_unwrapped_weights_of_torchao_train_as_on_one_process(ranks):
    pytest.importorskip("torchao")
    layouts = [(1, 1), (1, 3), (2, 3)] if ranks == 2 else [(1, 1)]
    run_on_ranks(ranks, train_all, [Case(kind, *layout) for kind in TORCHAO for layout in layouts])


def refuse_of_torchao():
    prepare_rank()
    with pytest.raises(ConfigError, match=r"units hold plain tensors; call torchao\.utils\.unwrap_tensor_subclass"):
        quantised.engine_of(Case("nf4"), quantised.quantised(Case("torchao, 8 bits")))


def test_weights_of_torchao_must_be_unwrapped():
    pytest.importorskip("torchao")
    run_on_ranks(1, refuse_of_torchao)


def test_adapters_train_with_moments_of_8_bits():
    cases = [Case("nf4 twice", ranks, 3, moments_in_8_bits=True) for ranks in (1, 2)]
    run_on_ranks(2, train_all, [*cases, cases[0]._replace(zero={"offload_optimizer": {"device": "cpu"}})])


GRID = {
    1: [Case(kind, 1, stage) for kind, stage in zip(QUANTISED, (0, 1, 2, 3)) if "stored in" not in kind],
    2: [
        Case(kind, ranks, stage, block)
        for kind, ranks, (stage, block) in product(
            ("nf4", "nf4 twice", "8 bits"), (1, 2), ((0, {}), (1, {}), (2, {}), (3, {}), (3, NONE))
        )
    ],
    4: [
        Case(kind, 2, stage, block)
        for kind, (stage, block) in product(("nf4 twice", "8 bits"), ((0, {}), (1, {}), (2, {}), (3, {}), (3, NONE)))
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", GRID)
def test_all_kinds_layouts_and_stages(ranks):
    run_on_ranks(ranks, train_and_count_all, GRID[ranks], seconds=1500)


BLOCKS = {"keep_frozen": "host"}, {"chunks_per_rank": 2}, {"recompute": "none"}, {"outputs": "all"}


def train_all(cases):
    prepare_rank()
    for case in cases:
        trained_as_one_process(case)[0].destroy()


@pytest.mark.slow
def test_other_settings_of_the_block_and_bytes_stored_as_numbers():
    cases = [Case("8 bits" if block == BLOCKS[0] else "nf4 twice", 1, 3, block) for block in BLOCKS[:3]]
    stored = [
        Case(f"fp4 stored in {dtype}", ranks, stage, {}, "bf16")
        for dtype, ranks, stage in (("bf16", 1, 3), ("bf16", 2, 2), ("fp32", 1, 3), ("fp32", 2, 1))
    ]
    run_on_ranks(2, train_all, [*cases, *stored], seconds=600)


def start_with_other_bases():
    prepare_rank()
    engine = quantised.engine_of(Case("nf4 twice", 2, 3), quantised.quantised(Case(seed=dist.get_rank())))
    losses, _ = quantised.train(engine, range(1))
    expected, _, _ = quantised.reference(Case("nf4 twice"), 2, 1)
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_the_first_ranks_bytes_and_constants_count():
    run_on_ranks(2, start_with_other_bases)


def evaluate_between_steps(case):
    """A CPU with AVX512-BF16 would pack 4 bits in another way for the evaluation."""
    prepare_rank()
    engine = quantised.engine_of(case)
    losses, _ = quantised.train(engine, range(1))
    engine.eval()
    with torch.no_grad():
        evaluated = engine(**quantised.micro_batch(9, 0, 0)).loss.item()
    engine.train()
    losses += quantised.train(engine, range(1, 3))[0]
    expected, _, _ = quantised.reference(case, dist.get_world_size(), 3)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert 4 < evaluated < 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4 twice", "8 bits"])
def test_evaluations_leave_the_bytes_as_they_are(kind):
    run_on_ranks(2, evaluate_between_steps, Case(kind, 2, 3))


def save(case, folder):
    prepare_rank()
    engine = quantised.engine_of(case)
    quantised.train(engine, range(2))
    engine.save_checkpoint(folder)
    engine.module.save_pretrained(Path(folder, "adapters"))
    state = engine.module.state_dict()
    if dist.get_rank() == 0:
        stock = quantised.quantised(case)
        expected = stock.state_dict()
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert "lora" in name or (torch.equal(state[name], value) and state[name].dtype == value.dtype), name
    dist.barrier()


def resume(case, folder):
    prepare_rank()
    other = quantised.quantised(case._replace(seed=5))
    engine = quantised.engine_of(case, other)
    engine.load_checkpoint(folder)
    losses, norms = quantised.train(engine, range(2, 3))
    expected_losses, expected_norms, _ = quantised.reference(case._replace(seed=0), dist.get_world_size(), 3)
    assert losses == pytest.approx(expected_losses[2:], rel=1e-5)
    assert norms == pytest.approx(expected_norms[2:], rel=1e-4)
    wrong = quantised.engine_of(case._replace(kind="nf4" if case.kind != "nf4" else "8 bits"))
    with pytest.raises(RuntimeError, match="is of another model"):
        wrong.load_checkpoint(folder)


@pytest.mark.parametrize("kind", ["nf4 twice", pytest.param("8 bits", marks=pytest.mark.slow)])
def test_a_run_goes_on_at_another_layout_with_the_bytes_and_constants_of_its_checkpoint(kind, tmp_path):
    run_on_ranks(2, save, Case(kind, 2, 3), str(tmp_path))
    run_on_ranks(2, resume, Case(kind, 1, 2), str(tmp_path))
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {each.name for each in tmp_path.glob("adapters/*")}


def refuse():
    prepare_rank()
    case = Case("nf4", 1, 2)
    engine = quantised.engine_of(case)
    quantised.train(engine, range(1))
    engine.module.merge_adapter()
    with pytest.raises(ValueError, match="was replaced since the engine was built"):
        quantised.train(engine, range(1, 2))
    stored = Case("fp4 stored in fp32", 1, 2)
    trained = quantised.quantised(stored).requires_grad_(True)
    with pytest.raises(ConfigError, match="holds quantised bytes, which cannot train; freeze it"):
        quantised.engine_of(stored, trained)
    layers = torch.nn.Sequential(bitsandbytes.nn.Linear4bit(64, 64), torch.nn.Linear(64, 1), torch.nn.Flatten(0))
    with pytest.raises(ConfigError, match="that bitsandbytes has not quantised; move the model to its device"):
        quantised.engine_of(case, layers)


@pytest.mark.slow
def test_merging_in_training_and_layers_that_wait_to_be_quantised_are_refused():
    run_on_ranks(1, refuse)


def test_constants_have_the_names_that_bitsandbytes_saves_them_under():
    for kind in ("nf4 twice", "8 bits"):
        model = quantised.quantised(Case(kind), adapters=False)
        saved = model.state_dict()
        found = dict(constants(model))
        assert len(found) > 9
        for name, tensor in found.items():
            assert name.endswith("nested_offset") or torch.equal(saved[name], tensor)
