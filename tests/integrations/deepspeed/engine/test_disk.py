"""What a run with ``nvme`` has on the disk, moves there and keeps in memory is what the formula tells. What cannot work
is refused by key."""

import tempfile
from contextlib import ExitStack
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import ds_lgamp
from ds_lgamp.config import ConfigError
from ds_lgamp.cost.activations import ActivationBytes, ChunkBytes
from ds_lgamp.cost.memory import rank_memory
from ds_lgamp.cost.offload import DiskUse, OnDisk, disk_use, host_beside_disk, room
from ds_lgamp.cost.units import ElementBytes, Sharding
from ds_lgamp.optimizers import host_updates
from ds_lgamp.partition import bus
from ds_lgamp.partition.agreement import everyone
from ds_lgamp.partition.memory import HostRoom
from ds_lgamp.partition.zero_partition import unit_sizes
from ds_lgamp.runtime.batch import ActionError
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.test_offload import DISK, OFFLOADS
from tests.integrations.deepspeed.linear import mean_square

WIDTH, ROWS, MICRO_BATCHES = 64, 4, 3
INPUT = 4 * WIDTH * ROWS
FP32, BF16 = {}, {"bf16": {"enabled": True}}
INPUTS = {"offload_activations": "nvme", "nvme_path": DISK["nvme_path"]}
CASES = {
    "optimizer": (2, "optimizer on nvme", OnDisk(optimizer=True), {}, BF16),
    "optimizer in fp32": (2, "optimizer on nvme", OnDisk(optimizer=True), {}, FP32),
    "parameters": (3, "parameters on nvme", OnDisk(optimizer=True, parameters=True), {}, BF16),
    "only parameters": (3, "only parameters on nvme", OnDisk(parameters=True), {}, FP32),
    "inputs too": (3, "parameters on nvme", OnDisk(True, True, True), INPUTS, FP32),
}
"""ZeRO stage, what lies on the disk, the block and the precision."""


def build():
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    with quiet():
        module = PipelineModule(layers, num_stages=1, loss_fn=mean_square)
    next(iter(module.parameters())).requires_grad_(False)
    return module


def engine_of(stage, zero, block=None, precision=FP32, kind=torch.optim.AdamW):
    torch.manual_seed(1)
    ds_lgamp.install()
    module = build()
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": stage, **zero},
        "ds_lgamp": {"layers_per_chunk": 1, **(block or {})},
        **precision,
    }
    optimizer = kind([p for p in module.parameters() if p.requires_grad], lr=0.01)
    with quiet():
        return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def step(engine, number):
    generator = torch.Generator().manual_seed(number)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    given = [torch.randn(ROWS, WIDTH, generator=generator, dtype=dtype) for _ in range(MICRO_BATCHES)]
    return engine.train_batch(iter([(each, torch.zeros_like(each)) for each in given])).item()


class Recorder:
    """Notes the memory that the host takes for what travels and for what the disk reads and writes."""

    def __init__(self, stack):
        self.bytes = 0
        for owner, name in ((HostRoom, "empty"), (bus, "aligned"), (host_updates, "aligned")):
            stack.enter_context(mock.patch.object(owner, name, self._noting(getattr(owner, name))))

    def _noting(self, stock):
        def made(*arguments):
            tensor = stock(*arguments)
            self.bytes += tensor.nbytes
            return tensor

        return made


def compare(stage, kept, on_disk, block, precision):
    """Returns what is counted in the last of three steps and what the formulas tell: on the disk and on the host."""
    with ExitStack() as stack:
        recorder = Recorder(stack)
        engine = engine_of(stage, OFFLOADS[kept], block, precision)
        optimizer, disk = engine.optimizer, engine.optimizer.partition.host.bus.disk
        for number in range(3):
            before = disk.bytes_read, disk.bytes_written
            step(engine, number)
            optimizer.partition.catch_up()
    units, in_memory = optimizer.partition.units, recorder.bytes
    in_memory += sum(u.master.values.nbytes for u in units if u.master.is_copy and not disk.holds(u.master.values))
    for shard, state in optimizer.state.items():
        in_memory += sum(each.nbytes for each in state.values() if each.shape == shard.shape and not disk.holds(each))
    moved = disk.bytes_read - before[0], disk.bytes_written - before[1]
    weights = 2 if precision else 4
    size = ElementBytes(weights=weights, gradients=weights, optimizer=8)
    activations = ActivationBytes(INPUT, INPUT, [ChunkBytes(INPUT, 0, 0)] * 4)
    sizes = unit_sizes(optimizer.partition)
    actions, offload = engine.lgamp.program(engine.lgamp.own_spec), engine.program_spec.offload
    sharding = Sharding(stage, engine.dp_world_size)
    told = disk_use(actions, sizes, offload, on_disk, sharding, size, activations)
    host = rank_memory(actions, sizes, sharding, size, offload=offload).host
    counted = DiskUse(disk.bytes_taken, *moved, told.buffers)
    return counted, told, in_memory, host_beside_disk(host, on_disk, size, told.buffers).peak


def do_all():
    prepare_rank()
    found = {name: compare(*CASES[name]) for name in ("optimizer in fp32", "parameters")}
    return found | {"checkpoint": checkpointed()}


def do_alone():
    prepare_rank()
    found = {name: compare(*case) for name, case in CASES.items()}
    return found | {"errors": errors(), "checkpoint": checkpointed(), "states": states()}


def checkpointed():
    """Returns whether a save copies the state, and the bytes that two loads take on the disk, beside those of the
    state."""
    engine = engine_of(3, OFFLOADS["parameters on nvme"], precision=BF16)
    step(engine, 0)
    disk, partition = engine.optimizer.partition.host.bus.disk, engine.optimizer.partition
    units = [unit for unit in partition.units if unit.trains]
    before, taken = disk.bytes_taken, []
    with tempfile.TemporaryDirectory() as folder:
        folder = everyone(folder)[0]
        engine.save_checkpoint(folder)
        for _ in range(2):
            engine.load_checkpoint(folder)
            taken.append(disk.bytes_taken - before)
        dist.barrier()
    state = sum(room(each.nbytes) for unit in units for each in [unit.master.values] * 3)
    state += sum(room(unit.master.values.nbytes) for unit in partition.units if not unit.trains)
    return engine.lgamp.saver._asynchronous, taken, state


def states():
    """Returns the states that are in memory: those that Adagrad makes in its constructor; those that a step of the
    whole optimizer makes, for a hook; and one that the script puts in the place of a state, before and after an
    update."""
    found = []
    for kind, watched in ((torch.optim.Adagrad, False), (torch.optim.AdamW, True)):
        engine = engine_of(3, OFFLOADS["optimizer on nvme"], kind=kind)
        if watched:
            hook = engine.optimizer.optimizer.register_step_post_hook(lambda *_: None)
            step(engine, 0)
            hook.remove()
        found.append(in_memory(engine))
    state = next(iter(engine.optimizer.state.values()))
    state["exp_avg"] = state["exp_avg"].clone()
    found.append(in_memory(engine))
    step(engine, 1)
    return [*found, in_memory(engine)]


def in_memory(engine):
    disk = engine.optimizer.partition.host.bus.disk
    every = [(shard, key, value) for shard, state in engine.optimizer.state.items() for key, value in state.items()]
    assert every
    return [key for shard, key, value in every if value.shape == shard.shape and not disk.holds(value)]


def errors():
    """Returns the error of a step, and that of the step after it, when the disk fails."""
    engine, said = engine_of(3, OFFLOADS["parameters on nvme"]), []
    step(engine, 0)
    with mock.patch("os.pwritev", lambda *_: 0):
        for number in range(2):
            try:
                step(engine, number)
            except ActionError as error:
                said.append(str(error))
    # The steps have said so. The end of this rank says nothing more.
    engine.finish_gathers()
    return said


@pytest.fixture(scope="module")
def alone():
    return run_on_ranks(1, do_alone)[0]


@pytest.fixture(scope="module")
def on_two_ranks():
    """What the first rank has, which holds most."""
    return run_on_ranks(2, do_all)[0]


@pytest.mark.parametrize("case", CASES)
def test_disk_and_host_are_those_of_the_formula(case, alone, on_two_ranks):
    for found in (alone, on_two_ranks) if case in on_two_ranks else (alone,):
        counted, told, in_memory, peak = found[case]
        assert counted == told and min(told) > 0
        assert in_memory == peak


def test_a_disk_that_fails_ends_the_next_step_that_needs_it(alone):
    first, second = alone["errors"]
    assert (
        f"zero_optimization.offload_optimizer.nvme_path is '{tempfile.gettempdir()}', where a file cannot be" in first
    )
    assert "an earlier batch failed" in second


def test_states_that_are_made_in_memory_go_to_the_disk(alone):
    assert alone["states"] == [[], [], ["exp_avg"], []]


def test_a_checkpoint_takes_no_memory_for_what_lies_on_the_disk(alone, on_two_ranks):
    for found in (alone, on_two_ranks):
        copies, taken, state = found["checkpoint"]
        assert not copies and taken == [state, state]


def refused():
    prepare_rank()
    said = []
    for path in ("/nowhere", "/proc"):
        with pytest.raises(ConfigError) as error:
            engine_of(3, {"offload_optimizer": {"device": "nvme", "nvme_path": path}})
        said.append(str(error.value))
    with mock.patch("os.posix_fallocate", side_effect=OSError(28, "full")), pytest.raises(ValueError) as error:
        engine_of(3, {"offload_optimizer": DISK})
    return [*said, str(error.value)]


def test_a_path_or_disk_that_cannot_hold_the_state_is_refused_before_training():
    ((missing, forbidden, full),) = run_on_ranks(1, refused)
    key = "zero_optimization.offload_optimizer.nvme_path is"
    assert f"{key} '/nowhere', which is no folder on this machine; create it or name another one" in missing
    assert f"{key} '/proc', where this rank cannot make files" in forbidden
    assert full.startswith(key) and "GB are free, but this rank needs" in full
