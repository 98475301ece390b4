"""Optimizers of bitsandbytes whose state has 8 bits train on shards as on one process with whole parameters: to the
bit, because blocks that share a scale lie where they lie there."""

from functools import partial
from itertools import pairwise, product
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.checkpoint.whole import read_whole
from ds_lgamp.config import ConfigError
from ds_lgamp.cost.memory import held_between_steps
from ds_lgamp.cost.offload import host_memory
from ds_lgamp.integrations.deepspeed.checkpoint.stock_writer import write_stock
from ds_lgamp.integrations.deepspeed.config.client_optimizer import in_8_bits
from ds_lgamp.integrations.deepspeed.engine.memory import element_bytes, sharding_of, update_of
from ds_lgamp.integrations.deepspeed.explain.explain import explain
from ds_lgamp.partition.zero_partition import unit_sizes
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.moe import MoeGpt
from tests.runtime.assembly import gathered
from tests.slow import slow_except

bitsandbytes = pytest.importorskip("bitsandbytes")
MICRO_BATCHES, STEPS = 2, 4
WITHOUT_COPIES = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


class Words(nn.Embedding):
    """Its state has 32 bits, as the Trainer asks for with every embedding."""

    def __init__(self):
        super().__init__(48, 100)
        bitsandbytes.optim.GlobalOptimManager.get_instance().register_module_override(
            self, "weight", {"optim_bits": 32}
        )


def layers():
    """No size is a multiple of a block. Two of the four larger tensors have state of 32 bits, as all biases have.
    On two pipeline ranks, the second one of these moves to the other rank."""
    torch.manual_seed(0)
    moved = nn.Linear(60, 70)
    bitsandbytes.optim.GlobalOptimManager.get_instance().register_module_override(moved, "weight", {"optim_bits": 32})
    return [Words(), nn.Linear(100, 60), nn.Tanh(), moved, nn.Tanh(), nn.Linear(70, 59)]


def loss_of(outputs, labels):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def micro_batch(step, data_rank, number):
    generator = torch.Generator().manual_seed(1000 * step + 10 * data_rank + number)
    tokens = torch.randint(0, 48, (2, 12), generator=generator)
    return tokens, tokens


def adam(parameters, **options):
    return bitsandbytes.optim.AdamW8bit(parameters, lr=1e-2, eps=1e-4, weight_decay=0.01, **options)


SMALL = partial(adam, min_8bit_size=1)
"""Biases have state of 8 bits, too."""


def lion(parameters):
    return bitsandbytes.optim.Lion(parameters, lr=1e-3, weight_decay=0.01, optim_bits=8, is_paged=True)


def arguments_of(
    pipeline_ranks=1, stage=3, zero=None, made=adam, callable_=False, block=None, tensor_ranks=1, experts=False, **more
):
    topology = PipeModelDataParallelTopology(
        pipeline_ranks, tensor_ranks, dist.get_world_size() // pipeline_ranks // tensor_ranks
    )
    module = PipelineModule(layers(), topology=topology, loss_fn=loss_of)
    if experts:
        module = MoeGpt(2, place=dist.get_rank()).pipeline(1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "zero_optimization": {"stage": stage, **(zero or {})},
        # Gradients add up in the order of ranks.
        "ds_lgamp": {"chunks_per_rank": 1 if pipeline_ranks == 4 else 2, "reproducible": True, **(block or {})},
        **more,
    }
    return {"model": module, "optimizer": made if callable_ else made(module.parameters()), "config": config}


def engine_of(**options):
    return deepspeed.initialize(**arguments_of(**options))[0]


def train(engine, steps, factor=1):
    """Trains with losses times ``factor``."""
    rank = engine.grid.get_data_parallel_rank()
    engine.module.loss_fn = lambda *given: loss_of(*given) * factor
    return [
        engine.train_batch(iter([micro_batch(step, rank, number) for number in range(MICRO_BATCHES)])).item()
        for step in steps
    ]


def masters(engine):
    engine.optimizer.partition.catch_up()
    return gathered(engine.optimizer.partition, lambda unit: unit.master.values)


def plain(data_ranks, made=adam, dtype=torch.float32):
    """Trains on one process, with bitsandbytes' own optimizer. Returns weights by name."""
    model = nn.Sequential(*layers()).to(dtype)
    optimizer = made(model.parameters())
    for step in range(STEPS):
        sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for rank in range(data_ranks):
            for number in range(MICRO_BATCHES):
                tokens, labels = micro_batch(step, rank, number)
                (loss_of(model(tokens), labels) / MICRO_BATCHES).backward()
            for total, parameter in zip(sums, model.parameters()):
                total += parameter.grad
            model.zero_grad()
        for total, parameter in zip(sums, model.parameters()):
            parameter.grad = total / data_ranks
        optimizer.step()
        model.zero_grad()
    return dict(model.named_parameters())


def train_as_plain(cases, ranks):
    prepare_rank()
    for case in cases:
        engine = engine_of(**case)
        train(engine, range(STEPS))
        dtype = torch.bfloat16 if "bf16" in case else torch.float32
        expected = plain(ranks // case.get("pipeline_ranks", 1), case.get("made", adam), dtype)
        for name, value in masters(engine).items():
            assert torch.equal(value, expected[name]), (case, name, (value - expected[name]).abs().max())
        engine.destroy()
    return len(cases)


def cases_on(ranks):
    yield from (
        {"pipeline_ranks": pipeline_ranks, "stage": stage, "zero": zero}
        for pipeline_ranks, stage, zero in product((1, 2, 4), (0, 1, 2, 3), (None, HOST))
        if ranks % pipeline_ranks == 0 and (zero is None or stage == 3)
    )
    yield {"made": lion}
    yield {"callable_": True}
    yield {"made": SMALL}
    yield {"made": partial(bitsandbytes.optim.Adagrad8bit, lr=1e-2)}
    yield {"stage": 1, "block": {"overlap_update": True}}
    if ranks == 1:
        # On several, gradients in bf16 add up in another order.
        yield {"bf16": WITHOUT_COPIES}


@pytest.mark.parametrize("ranks", slow_except([2], [1, 2, 4]))
def test_weights_are_those_of_a_plain_loop_to_the_bit(ranks):
    cases = list(cases_on(ranks))
    assert run_on_ranks(ranks, train_as_plain, cases, ranks, seconds=600) == [len(cases)] * ranks


def skip_and_freeze():
    """Trains with a step whose loss is infinite between others, and with a weight that is frozen for a step."""
    prepare_rank()
    for zero in (None, HOST):
        found = []
        for factors in ((1, float("inf"), 1), (1, 1)):
            engine, step = engine_of(zero=zero, block={"nonfinite": "skip"}), 0
            for factor in factors:
                train(engine, [step], factor)
                step += factor == 1
            found.append(masters(engine))
        assert all(torch.equal(value, found[1][name]) for name, value in found[0].items()), zero
        engine = engine_of(zero=zero)
        frozen, named = "1.weight", engine.module.named_parameters()
        trained = next(parameter for name, parameter in named if name.endswith(frozen))
        before = [masters(engine)[frozen]]
        for step, trains in enumerate((True, False, True)):
            trained.requires_grad_(trains)
            train(engine, [step])
            before.append(masters(engine)[frozen])
        assert [torch.equal(*pair) for pair in pairwise(before)] == [False, True, False], zero
        segments, state = engine.optimizer.partition.segments(), engine.optimizer.state
        steps = {segment.entry.name: state[segment.shard]["step"] for segment in segments}
        assert steps.pop(frozen) == 2 and set(steps.values()) == {3}
        arguments = arguments_of(zero=zero)
        later = next(parameter for name, parameter in arguments["model"].named_parameters() if name == "5.weight")
        later.requires_grad_(False)
        engine = deepspeed.initialize(**arguments)[0]
        train(engine, [0])
        assert "5.weight" not in state_of(engine)
        later.requires_grad_(True)
        train(engine, [1])
        assert state_of(engine)["5.weight"] == torch.uint8


def test_a_skipped_step_changes_nothing_and_a_frozen_weight_keeps_its_state():
    run_on_ranks(1, skip_and_freeze)


def state_of(engine):
    """Returns the types of moments by the name of the parameter."""
    state, found = engine.optimizer.state, {}
    for segment in engine.optimizer.partition.segments():
        found[segment.entry.name] = state[segment.shard]["state1"].dtype
    return found


def go_on_from(folder):
    """Saves at one layout, and goes on at others from there."""
    prepare_rank()
    first = engine_of()
    train(first, range(2))
    first.save_checkpoint(folder, tag="first")
    train(first, range(2, STEPS))
    expected = masters(first)
    types = state_of(first)
    for place in ({"pipeline_ranks": 2}, {"stage": 0}, {"stage": 1}, {"zero": HOST}):
        engine = engine_of(**place)
        engine.load_checkpoint(folder, tag="first")
        own = {name: types[name] for name in state_of(engine).keys() & types.keys()}
        assert {**state_of(engine), **own} == state_of(engine), place
        if engine.grid.get_data_parallel_world_size() == first.grid.get_data_parallel_world_size():
            train(engine, range(2, STEPS))
            assert all(torch.equal(value, expected[name]) for name, value in masters(engine).items()), place
        engine.save_checkpoint(folder, tag="second")
        again = engine_of()
        again.load_checkpoint(folder, tag="second")
    own = engine_of()
    own.load_checkpoint(folder, tag="first")
    kept = own.optimizer.state_dict()
    train(own, range(2, STEPS))
    own.optimizer.load_state_dict(kept)
    train(own, range(2, STEPS))
    assert all(torch.equal(value, expected[name]) for name, value in masters(own).items())
    go_on_with_small_gradients(folder)
    if dist.get_rank() == 0:
        with pytest.raises(CheckpointError, match="is of a run with AdamW8bit, whose state stock DeepSpeed keeps in"):
            write_stock(read_whole(Path(folder, "first")), Path(folder, "stock"), 1, 1)
    with pytest.raises(CheckpointError, match="the optimizer state is from AdamW8bit, but this run has AdamW"):
        engine_of(made=torch.optim.AdamW).load_checkpoint(folder, tag="first")
    exact = engine_of(made=bitsandbytes.optim.AdamW, zero_allow_untested_optimizer=True)
    train(exact, range(1))
    exact.save_checkpoint(folder, tag="32 bits")
    for made in (torch.optim.AdamW, adam):
        with pytest.raises(CheckpointError, match="the optimizer state is from bitsandbytes' AdamW, but this run has"):
            engine_of(made=made).load_checkpoint(folder, tag="32 bits")


def go_on_with_small_gradients(folder):
    """Moments fade. Zeros behind a parameter must not set the scale of its last block then. And what has moments of 8
    bits keeps them where the script asks for 32, as with bitsandbytes' own."""
    results = []
    for made in (SMALL, SMALL, adam):
        engine = engine_of(made=made)
        if results:
            engine.load_checkpoint(folder, tag="third")
        else:
            train(engine, range(2))
            engine.save_checkpoint(folder, tag="third")
        train(engine, range(2, 8), factor=1e-3)
        results.append(masters(engine))
    assert all(torch.equal(value, result[name]) for result in results[1:] for name, value in results[0].items())


def test_runs_go_on_at_other_layouts_to_the_bit(tmp_path):
    run_on_ranks(2, go_on_from, str(tmp_path))


def count_bytes(ranks):
    prepare_rank()
    for zero, bf16 in product((None, HOST), (False, True)):
        engine = engine_of(zero=zero, bf16={"enabled": bf16})
        train(engine, range(1))
        engine.optimizer.partition.catch_up()
        update = update_of(engine.optimizer.optimizer, None)
        size = element_bytes(engine._config, update, engine.lgamp.travel, False)
        units, spec = unit_sizes(engine.optimizer.partition), engine.lgamp.program_spec
        sharding = sharding_of(spec, engine.lgamp.settings, ranks)
        told = held_between_steps(units, sharding, size)[2]
        if zero is not None:
            told = host_memory(units, spec.offload, sharding, size).optimizer_state
        state = engine.optimizer.optimizer.state.values()
        found = sum(value.nbytes for each in state for value in each.values() if torch.is_tensor(value))
        assert told == found if ranks == 1 else found <= told, (zero, bf16, told, found)
        arguments = arguments_of(zero=zero, bf16={"enabled": bf16})
        explained = explain({**arguments, "config_class": engine._config}, "parameters").ranks[0].memory
        assert told == (explained if zero is None else explained.host).optimizer_state
        # In 32 bits, an element takes eight bytes. The embedding and the biases do.
        elements = sum(unit.parameters for unit in units)
        assert ranks == 2 or found < 5 * elements


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_formula_of_memory_tells_the_bytes_of_the_state(ranks):
    """On several ranks it tells the most that one may hold: who holds which small parameters, only the cut knows."""
    run_on_ranks(ranks, count_bytes, ranks)


def overridden(key, value, made):
    def make(parameters):
        parameters, manager = list(parameters), bitsandbytes.optim.GlobalOptimManager.get_instance()
        # It knows parameters by their ids, and keeps those of models that are gone.
        manager.pid2config.clear()
        if dist.get_rank() == dist.get_world_size() - 1:
            manager.override_config(parameters[-1], key, value)
        return made(parameters)

    return make


class Projected(bitsandbytes.optim.AdamW8bit):
    """As the optimizer of 8 bits of galore_torch, it steps in another way."""


def refuse(folder):
    prepare_rank()
    disk = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    ademamix = bitsandbytes.optim.AdEMAMix8bit
    for said, options in {
        "whose state of 8 bits needs whole tensors; use bitsandbytes' AdamW8bit": {"made": ademamix},
        "with state of 8 bits, which no disk holds; use 'cpu'": {"zero": disk},
        "live_checkpoint is .*, but the optimizer is AdamW8bit": {"block": {"live_checkpoint": folder}},
        "stochastic_rounding is True, but the optimizer is AdamW8bit": {
            "bf16": WITHOUT_COPIES,
            "block": {"stochastic_rounding": True},
        },
    }.items():
        with pytest.raises(ConfigError, match=said):
            engine_of(**options)
    of_torchao = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "torchao.optim.adam"})
    of_32_bits = bitsandbytes.optim.AdamW
    for said, made in {
        "torchao's AdamW8bit, whose scales differ between shards and whole tensors": of_torchao,
        "torchao's Mine, whose scales differ": type("Mine", (of_torchao,), {}),
        "optimizer is Projected, whose state of 8 bits needs whole tensors": Projected,
        "optimizer is LARS32bit, which scales by the norms": partial(
            bitsandbytes.optim.LARS32bit, lr=1e-2, momentum=0.9
        ),
        "GlobalOptimManager overrides betas of a parameter": overridden("betas", (0.5, 0.5), adam),
        "GlobalOptimManager overrides lr of a parameter": overridden("lr", 0.5, of_32_bits),
        "overrides optim_bits of a parameter, but the optimizer is AdamW of 32": overridden(
            "optim_bits", 8, of_32_bits
        ),
    }.items():
        for callable_ in (False, True):
            with pytest.raises(ConfigError, match=said):
                # The Trainer allows all.
                engine_of(made=made, callable_=callable_, zero_allow_untested_optimizer=True)
    for option, value in (("percentile_clipping", 5), ("block_wise", False)):
        optimizer = adam(nn.Linear(2, 2).parameters())
        # As bitsandbytes before 0.49 says it.
        setattr(optimizer.args, option, value)
        with pytest.raises(ConfigError, match="whose state of 8 bits needs whole tensors"):
            in_8_bits(optimizer)


def refuse_slices():
    prepare_rank()
    for callable_ in (False, True):
        with pytest.raises(ConfigError, match="AdamW8bit, but tensor-parallel ranks have slices of parameters"):
            engine_of(tensor_ranks=2, callable_=callable_)
        with pytest.raises(ConfigError, match="divide the experts of a layer .* one with state of 8 bits"):
            engine_of(experts=True, callable_=callable_)


def test_slices_of_parameters_are_refused():
    run_on_ranks(2, refuse_slices)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_has_no_counterpart_on_shards_is_refused(tmp_path, ranks):
    """On every rank, although the script of the last one alone may ask for something else."""
    run_on_ranks(ranks, refuse, str(tmp_path))
