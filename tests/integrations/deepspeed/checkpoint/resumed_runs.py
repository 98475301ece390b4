"""Runs that save and resume: the code of the ranks of test_checkpoint.py."""

import random
from argparse import Namespace
from enum import Enum
from pathlib import Path

import deepspeed
import numpy
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

import ds_lgamp
from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.checkpoint.ranges import weights
from ds_lgamp.partition.unit import parts_of
from testing.deepspeed_rank import quiet
from tests.integrations.deepspeed.linear import mean_square, whole_state
from tests.integrations.deepspeed.models import seed

DATA = list(zip(torch.randn(48, 6, generator=torch.Generator().manual_seed(0)), torch.zeros(48, 6)))
SAVED, RESUMED = 3, 3
"""Steps before and after the save. The engine's own data have 10 or 12 micro-batches for each of 2 data-parallel ranks,
so they start again in step 3 or just after it."""
LAYOUTS = {
    "zero 3, own data": (3, {"layers_per_chunk": 1}, {"training_data": 40}),
    "zero 1, end of an epoch": (1, {"layers_per_chunk": 1}, {"training_data": 48}),
    "zero 3, stored activations": (3, {"layers_per_chunk": 1, "recompute": "none"}, {}),
    "zero 1, seeded layers": (1, {"layers_per_chunk": 2}, {"seed_layers": True, "seed_fn": seed}),
    "zero 0": (0, {"layers_per_chunk": 1}, {}),
    "zero 2, bf16": (2, {}, {"bf16": True}),
}


class Place(Enum):
    RUNS = 1


class Noise(nn.Module):
    """Draws from three generators."""

    def forward(self, inputs):
        return inputs + 0.01 * (torch.rand_like(inputs) + random.random() + numpy.random.rand())


ADAM = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}


def seed_all(value):
    torch.manual_seed(value)
    random.seed(value)
    numpy.random.seed(value)


def engine_of(stage, block, options, width=6, grouped=False, scheduler=True, optimizer=ADAM):
    torch.manual_seed(3 + dist.get_rank() // 2)
    bf16 = options.get("bf16", False)
    layers = [
        LayerSpec(nn.Linear, 6, width),
        LayerSpec(nn.Dropout, 0.2),
        LayerSpec(Noise),
        LayerSpec(nn.LayerNorm if bf16 else nn.BatchNorm1d, width),
        LayerSpec(nn.Linear, width, 6),
    ]
    layers += [LayerSpec(nn.Linear, 6, 6) for _ in range(options.get("more", 0))]
    ds_lgamp.install()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "ds_lgamp": block,
        "optimizer": optimizer,
    }
    if scheduler:
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_type": "linear"}}
    loss = (lambda output, target: mean_square(output.float(), target)) if bf16 else mean_square
    with quiet():
        seeding = {key: value for key, value in options.items() if key.startswith("seed")}
        module = PipelineModule(layers, num_stages=2, loss_fn=loss, **seeding)
        parameters = list(module.parameters())
        if grouped:
            kinds = [[parameter for parameter in parameters if parameter.dim() == dim] for dim in (1, 2)]
            parameters = [{"params": kind} for kind in kinds]
        return deepspeed.initialize(
            model=module,
            model_parameters=parameters,
            training_data=DATA[: options["training_data"]] if "training_data" in options else None,
            config=config,
        )[0]


def steps(engine, count):
    """Trains. Returns loss, norm, learning rate and samples of every step."""
    results = []
    for _ in range(count):
        loss = engine.train_batch(None if engine.training_data else own_batches(engine))
        norm = float(engine.get_global_grad_norm())
        results.append((loss.item(), norm, engine.get_lr(), engine.global_samples))
    return results


def own_batches(engine):
    """Returns the micro-batches of this step and data-parallel rank."""
    generator = torch.Generator().manual_seed(10 * engine.global_steps + engine.grid.data_parallel_id)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    return iter([(torch.randn(2, 6, generator=generator).to(dtype), torch.zeros(2, 6)) for _ in range(4)])


def end_state(engine):
    return {name: value.tolist() for name, value in whole_state(engine.module).items()}


def client_state_of(engine):
    """Returns what scripts save: their arguments, and more."""
    arguments = Namespace(rate=numpy.float64(0.1), dtype=torch.bfloat16, output=Path("runs"), place=Place.RUNS)
    return {"epoch": 7, "args": arguments, "seen": {engine.stage_id, 1}, "best": numpy.float32(0.5)}


def resume(folder, layout):
    """Returns the steps and weights after the save: of the uninterrupted run, of the resumed one, and after the first
    engine loads again."""
    uninterrupted = engine_of(*layout)
    steps(uninterrupted, SAVED)
    uninterrupted.save_checkpoint(folder, client_state=client_state_of(uninterrupted))
    expected = steps(uninterrupted, RESUMED), end_state(uninterrupted)
    fresh = engine_of(*layout)
    steps(fresh, 1)
    seed_all(99)
    path, client_state = fresh.load_checkpoint(folder)
    assert client_state == client_state_of(fresh) and path == str(Path(folder) / "global_step3")
    resumed = steps(fresh, RESUMED), end_state(fresh)
    # Loads once more into the first engine.
    uninterrupted.load_checkpoint(folder, tag="global_step3")
    again = steps(uninterrupted, RESUMED), end_state(uninterrupted)
    return expected, resumed, again


def weights_only(folder):
    """Returns the weights of a run, and of a fresh run that loads only them: weights, steps and optimizer state."""
    saved, engine = (engine_of(*LAYOUTS["zero 2, bf16"]) for _ in range(2))
    steps(saved, 1)
    saved.save_checkpoint(folder, tag=1, save_latest=False)
    engine.load_checkpoint(folder, tag=1, load_module_only=True)
    state = engine.optimizer.optimizer.state_dict()["state"]
    return end_state(saved), end_state(engine), engine.global_steps, state


def neighbours(folder):
    """Saves a tag again beside a deeper tag and a user's file. Returns what its folder then holds."""
    engine = engine_of(*LAYOUTS["zero 0"])
    engine.save_checkpoint(folder, tag="run/deeper")
    engine.save_checkpoint(folder, tag="run")
    if dist.get_rank() == 0:
        (Path(folder) / "run" / "tokenizer.json").write_text("{}")
    engine.save_checkpoint(folder, tag="run")
    engine.load_checkpoint(folder, tag="run/deeper")
    return sorted(path.name for path in (Path(folder) / "run").iterdir())


def shares():
    """Returns how many elements this rank writes at stage 0, and how many it holds."""
    partition = engine_of(*LAYOUTS["zero 0"]).optimizer.partition
    held = sum(part.shape.numel() for unit in partition.units for part in parts_of(unit))
    return sum(shard.values.numel() for shard in weights(partition).values()), held


def few_kept(folder):
    """Returns the content of the directory after each of four synchronous saves."""
    engine = engine_of(1, {"keep_last": 2, "asynchronous_save": False}, {})
    seen = []
    for tag in ("first", "second", "third", "second"):
        engine.save_checkpoint(folder, tag=tag)
        dist.barrier()
        seen.append(sorted(path.name for path in Path(folder).iterdir()))
        dist.barrier()
    return seen


def newest_whole(folder):
    """Damages the newest of three checkpoints after another. Returns, after each time, which one was loaded, and the
    steps of the engine; at last the error."""
    engine = engine_of(3, {"layers_per_chunk": 1, "asynchronous_save": False}, {})
    for _ in range(3):
        steps(engine, 1)
        engine.save_checkpoint(folder)
    found = []
    for damage in (None, cut_tensors, missing_state, cut_tensors):
        dist.barrier()
        if damage is not None and dist.get_rank() == 0:
            damage(Path(folder) / f"global_step{4 - len(found)}")
        dist.barrier()
        try:
            path, _ = engine.load_checkpoint(folder)
        except CheckpointError as error:
            found.append(str(error))
        else:
            dist.barrier()
            found.append((Path(path).name, engine.global_steps, (Path(folder) / "latest").read_text()))
    return found


def cut_tensors(checkpoint):
    """Cuts the file of the last rank."""
    (file,) = checkpoint.glob("tensors-*/__3_0.distcp")
    file.write_bytes(file.read_bytes()[:-99])


def missing_state(checkpoint):
    (checkpoint / "state.json").unlink()


def stock_is_last(folder):
    """Lets ``latest`` name a checkpoint of stock DeepSpeed beside an older one. Returns the error, and what ``latest``
    names then."""
    engine = engine_of(*LAYOUTS["zero 0"])
    engine.save_checkpoint(folder, tag="older")
    engine.wait_for_checkpoint()
    if dist.get_rank() == 0:
        (Path(folder) / "stock").mkdir()
        (Path(folder) / "stock" / "mp_rank_00_model_states.pt").write_bytes(b"")
        (Path(folder) / "latest").write_text("stock")
    dist.barrier()
    with pytest.raises(CheckpointError) as error:
        engine.load_checkpoint(folder)
    return str(error.value), (Path(folder) / "latest").read_text()


def fewer_layers(folder):
    """Loads a checkpoint into a model with two more layers. Returns the weights of the small model, and of the large
    one as built and as loaded."""
    small, large = (engine_of(3, {"layers_per_chunk": 1}, {"more": more}) for more in (0, 2))
    steps(small, 1)
    small.save_checkpoint(folder)
    built = end_state(large)
    with pytest.raises(CheckpointError, match=r"is of another model \(5.bias is absent there, \[6\] here, 5.weight"):
        large.load_checkpoint(folder)
    large.load_checkpoint(folder, load_module_strict=False, load_module_only=True)
    loaded = end_state(large)
    with pytest.raises(CheckpointError, match=r"no optimizer state of \d.weight, which trains here; pass load_opt"):
        large.load_checkpoint(folder, load_module_strict=False)
    large.load_checkpoint(folder, load_module_strict=False, load_optimizer_states=False)
    steps(large, 1)
    return end_state(small), built, loaded


class Counting(nn.Module):
    """Has a buffer whose value differs between copies."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, inputs):
        return inputs * self.weight


def own_buffers(folder):
    """Returns each rank's copy of a tied module's buffer, before the save and after the load."""
    layers = [TiedLayerSpec("counting", Counting), LayerSpec(nn.Linear, 6, 6), TiedLayerSpec("counting", Counting)]
    ds_lgamp.install()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 1},
        "ds_lgamp": {"layers_per_chunk": 2},
        "optimizer": ADAM,
    }
    with quiet():
        module = PipelineModule(layers, num_stages=2, loss_fn=mean_square)
        engine = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]
    buffer = dict(module.named_buffers())["tied_modules.counting.seen"]
    found = []
    for values in ([1.0, float(engine.grid.data_parallel_id)], [float(engine.stage_id), 2.0], [3.0, 3.0]):
        buffer.copy_(torch.tensor([*values]))
        engine.save_checkpoint(folder)
        written = buffer.tolist()
        buffer.zero_()
        engine.load_checkpoint(folder)
        found.append((written, buffer.tolist()))
    return found


def with_another_default_device(folder):
    """Returns the weights that a run saves, and those that one loads whose script makes its tensors elsewhere."""
    saved, resumed = (engine_of(*LAYOUTS["zero 3, stored activations"]) for _ in range(2))
    steps(saved, 1)
    with torch.device("meta"):
        saved.save_checkpoint(folder)
        resumed.load_checkpoint(folder)
    return end_state(saved), end_state(resumed)


class Remembering(nn.Linear):
    """Has an extra state."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.seen = 0

    def forward(self, inputs):
        self.seen += inputs.shape[0]
        return super().forward(inputs)

    def get_extra_state(self):
        return {"seen": torch.tensor(self.seen)}

    def set_extra_state(self, state):
        self.seen = int(state["seen"])


def extra_states(folder):
    """Returns the extra states of this rank's layers where they were saved, and where they are loaded: on as many
    pipeline ranks, and on twice as many."""
    ds_lgamp.install()
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "optimizer": ADAM}
    found = []
    for pipeline_ranks in (2, 2, 4):
        with quiet():
            layers = [LayerSpec(Remembering, 6, 6) for _ in range(4)]
            module = PipelineModule(layers, num_stages=pipeline_ranks, loss_fn=mean_square)
            block = {"layers_per_chunk": 1, "recompute": "none"}
            engine = deepspeed.initialize(
                model=module, model_parameters=list(module.parameters()), config={**config, "ds_lgamp": block}
            )[0]
        if found:
            engine.load_checkpoint(folder, load_module_only=pipeline_ranks == 4)
        else:
            steps(engine, 3)
            engine.save_checkpoint(folder)
        found.append([layer.seen for layer in module.forward_funcs])
    return found


class Curve(torch.optim.lr_scheduler.LRScheduler):
    """Has a function, which torch counts among its state."""

    def __init__(self, optimizer, curve):
        self.curve = curve
        super().__init__(optimizer)

    def get_lr(self):
        return [rate * self.curve(self.last_epoch) for rate in self.base_lrs]


def curves(folder):
    """Returns the learning rates of a run after its save, and of one that loads it."""
    engines = [engine_of(*LAYOUTS["zero 0"], scheduler=False) for _ in range(2)]
    for engine in engines:
        engine.lr_scheduler = Curve(engine.optimizer.optimizer, lambda step: 1 / (1 + step))
    saved, resumed = engines
    steps(saved, 2)
    saved.save_checkpoint(folder)
    resumed.load_checkpoint(folder)
    return [[rate for _, _, rate, _ in steps(engine, 2)] for engine in engines]
