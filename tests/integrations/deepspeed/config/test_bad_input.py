"""Invalid input ends a run before anything changes, on every rank, in one sentence that names key, value and fix."""

import json
import os
import subprocess
import sys

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import nn

import ds_lgamp
from ds_lgamp.config import ConfigError
from testing import ROOT, SCRIPTS
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.linear import batches, linears, mean_square

EXAMPLE = SCRIPTS / "public_example.py"
NULL = object()
"""Stands for null. None removes a key."""
BASE = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3}}

BLOCKS = {
    "a typo": ({"resident_chunk": 2}, "ds_lgamp.resident_chunk is no known key; did you mean resident_chunks?"),
    "text for a number": ({"resident_chunks": "2"}, "ds_lgamp.resident_chunks is '2': input should be a valid integer"),
    "no resident chunk": ({"resident_chunks": 0}, "ds_lgamp.resident_chunks is 0: input should be greater than 0"),
    "an unknown schedule": ({"schedule": "zb1"}, "ds_lgamp.schedule is 'zb1': input should be 'layered'"),
    "an unknown placement": ({"placement": "looped"}, "ds_lgamp.placement is 'looped': input should be 'modular'"),
    "an unknown recomputation": ({"recompute": "half"}, "ds_lgamp.recompute is 'half': input should be 'full'"),
    "a recomputation nobody offers": (
        {"recompute": "selective"},
        "ds_lgamp.recompute is 'selective', but no layer of the model offers it: give layers an attribute",
    ),
    "a group of no micro-batch": ({"micro_batch_group": 0}, "ds_lgamp.micro_batch_group is 0"),
    "enabled as text": ({"enabled": "yes"}, "ds_lgamp.enabled is 'yes': input should be a valid boolean"),
    "no object": ("layered", "ds_lgamp is 'layered'; it must be an object"),
    "two cuts": ({"chunks_per_rank": 2, "layers_per_chunk": 1}, "both cut the layers; keep one of them"),
    "chunks with 1f1b": (
        {"schedule": "1f1b", "chunks_per_rank": 2},
        "chunks_per_rank is 2, but schedule '1f1b' has one",
    ),
    "cuts with gpipe": ({"schedule": "gpipe", "layers_per_chunk": 1}, "layers_per_chunk is 1, but schedule 'gpipe'"),
    "groups with gpipe": (
        {"schedule": "gpipe", "micro_batch_group": 1},
        "micro_batch_group is 1, but groups belong",
    ),
    "interleaved on contiguous": (
        {"schedule": "interleaved_1f1b", "placement": "contiguous"},
        "placement is 'contiguous', but schedule 'interleaved_1f1b' needs 'modular'; remove it",
    ),
    "chunks that do not interleave": (
        {"schedule": "interleaved_1f1b", "layers_per_chunk": 2},
        "ds_lgamp.layers_per_chunk is 2, which cuts 5 layers into 3 chunks, but schedule 'interleaved_1f1b' needs a mu",
    ),
    "more ranks than chunks": ({"layers_per_chunk": 5}, "ds_lgamp.layers_per_chunk is 5, which cuts 5 layers into 1"),
    "more chunks than layers": ({"chunks_per_rank": 4}, "ds_lgamp.chunks_per_rank is 4: 2 pipeline ranks would need 8"),
}

RATE = {"type": "SGD", "params": {"lr": 0.1}}
CONFIGS = {
    "a misspelt block": ({"ds_lgamp": None, "ds-lgamp": {}}, "ds-lgamp is no known key; did you mean ds_lgamp?"),
    "another misspelt block": ({"ds_lgamp": None, "DS_LGMAP": {}}, "DS_LGMAP is no known key; did you mean ds_lgamp?"),
    "a scheduler's typo": (
        {"optimizer": RATE, "scheduler": {"type": "WarmupLR", "params": {"warmup": 3}}},
        "scheduler.params is {'warmup': 3}, but WarmupLR refuses it (TypeError: ",
    ),
    "an unknown scheduler": (
        {"optimizer": RATE, "scheduler": {"type": "Warmup", "params": {}}},
        "scheduler.type is 'Warmup', which is unknown; use LRRangeTest",
    ),
    "a scheduler without parameters": (
        {"optimizer": RATE, "scheduler": {"type": "WarmupLR"}},
        "scheduler.params is missing; write an object such as {}",
    ),
    "an optimizer's typo": (
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentun": 0.9}}},
        "optimizer.params is {'lr': 0.1, 'momentun': 0.9}, but SGD refuses it (TypeError: ",
    ),
    "a negative learning rate": (
        {"optimizer": {"type": "AdamW", "params": {"lr": -1.0, "torch_adam": True}}},
        "but adamw refuses it (ValueError: Invalid learning rate: -1.0)",
    ),
    "clipping in the optimizer": (
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "max_grad_norm": 1.0}}},
        "optimizer.params.max_grad_norm is 1.0, which DeepSpeed refuses; write gradient_clipping instead",
    ),
    "a breakdown that is never printed": ({"wall_clock_breakdown": True}, "but steps_per_print is missing; write how"),
    "printing every 0 steps": ({"steps_per_print": 0}, "steps_per_print is 0; write a whole number from 1"),
    "clipping as text": ({"gradient_clipping": "1.0"}, "gradient_clipping is '1.0'; write a number from 0"),
    "negative clipping": ({"gradient_clipping": -1}, "gradient_clipping is -1; write a number from 0"),
    "a stage as text": ({"zero_optimization": {"stage": "3"}}, "zero_optimization.stage is '3'; write 0, 1, 2 or 3"),
    "bf16 as text": ({"bf16": {"enabled": "yes"}}, "bf16.enabled is 'yes'; write true or false"),
    "an unknown log level": ({"log_level": "loud"}, "log_level is 'loud', but ds_lgamp takes debug, info, warning"),
    "a section that is null": ({"checkpoint": NULL}, "checkpoint is None; it must be an object such as {}"),
    "what DeepSpeed refuses": ({"data_types": {"keep_in_fp32_modules": 3}}, "refuses the configuration: DeepSpeedConf"),
    "micro-batches that do not interleave": (
        {"ds_lgamp": {"schedule": "interleaved_1f1b", "chunks_per_rank": 2}, "gradient_accumulation_steps": 3},
        "ds_lgamp.schedule is 'interleaved_1f1b', which needs a multiple of 2 (pipeline ranks) micro-batches, but grad",
    ),
    "batch sizes that do not multiply": (
        {"train_batch_size": 9},
        "train_batch_size is 9, which is not 4 (train_micro_batch_size_per_gpu) x 2 (gradient_accumulation_steps)",
    ),
    "a batch that micro-batches do not divide": (
        {"train_batch_size": 9, "gradient_accumulation_steps": None},
        "train_batch_size is 9, which is no multiple of 4 (train_micro_batch_size_per_gpu) x 1 (data-parallel ranks)",
    ),
    "no batch size": (
        {"train_micro_batch_size_per_gpu": None},
        "train_batch_size and train_micro_batch_size_per_gpu are missing; write at least one of them",
    ),
    "a batch size as text": (
        {"gradient_accumulation_steps": "2"},
        "gradient_accumulation_steps is '2'; write a whole number from 1",
    ),
    "a batch of nothing": ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu is 0; write a whole"),
    "a typo at the top": (
        {"gradient_acumulation_steps": 2},
        "gradient_acumulation_steps is no known key; did you mean gradient_accumulation_steps?",
    ),
    "a typo in a section": (
        {"zero_optimization": {"stagee": 3}},
        "zero_optimization.stagee is no known key; did you mean stage? Or remove it",
    ),
    "the block in a section": (
        {"zero_optimization": {"stage": 3, "ds_lgamp": {}}},
        "zero_optimization.ds_lgamp is the block in the wrong place; it stands at the top",
    ),
    "a value left to a trainer": ({"gradient_clipping": "auto"}, 'gradient_clipping is "auto"'),
    "a section that is a number": ({"zero_optimization": 3}, "zero_optimization is 3; it must be an object"),
    "a stage that does not exist": (
        {"zero_optimization": {"stage": 4}},
        "stage is 4; write 0, 1, 2 or 3",
    ),
    "fp16 where the device has none": (
        {"fp16": {"enabled": True}},
        "fp16.enabled is True, but DeepSpeed says that this device (cpu) has no fp16; use bf16 or remove it",
    ),
    "two precisions": (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        "fp16.enabled and bf16.enabled are True; set one of them to false",
    ),
    "a negative loss scale": ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale is -1; write a number from 0"),
    "master weights in fp16": (
        {"fp16": {"fp16_master_weights_and_grads": True}},
        "fp16.fp16_master_weights_and_grads is True: the optimizer updates fp32 copies of the parameters; remove it",
    ),
    "parameters of another type than the precision": (
        {"data_types": {"param_dtype": "half"}},
        "data_types.param_dtype is 'half', but fp16.enabled and bf16.enabled make parameters torch.float32; change one",
    ),
    "autocast": ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled is True"),
    "accumulation in integers": ({"data_types": {"grad_accum_dtype": "int8"}}, "data_types.grad_accum_dtype is 'int8'"),
    "sums instead of means": ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op is 'sum'"),
    "reductions in integers": ({"communication_data_type": "int8"}, "communication_data_type is 'int8', but ds_lgamp"),
    "an offloaded optimizer": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
        "zero_optimization.offload_optimizer.device is 'cpu'",
    ),
    "offloaded parameters": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        "zero_optimization.offload_param.device is 'nvme'",
    ),
    "quantized weights": (
        {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
        "zero_optimization.zero_quantized_weights is True",
    ),
    "tensor parallelism by DeepSpeed": ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size is 2"),
    "compiled communication": ({"compile": {"deepcompile": True}}, "compile.deepcompile is True"),
    "another engine": ({"hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled is True"),
    "an optimizer of whole tensors": ({"optimizer": {"type": "Lamb"}}, "optimizer.type is 'lamb', which scales by the"),
    "an unknown optimizer": ({"optimizer": {"type": "Adma"}}, "optimizer.type is 'Adma'"),
}


SHARED = nn.Parameter(torch.eye(6))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = SHARED

    def forward(self, inputs):
        return inputs @ self.weight


class WithStray(PipelineModule):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.stray = nn.Parameter(torch.ones(1))


def pipeline(layers=None, kind=PipelineModule, **options):
    options = {"num_stages": 2, **options}
    with quiet():
        return kind(linears(5) if layers is None else layers, loss_fn=mean_square, **options)


def of_three_axes():
    topology = ProcessTopology(axes=["pipe", "data", "sequence"], dims=[1, 1, 2])
    return pipeline(num_stages=None, topology=topology)


def used_module():
    module = pipeline()
    with quiet():
        deepspeed.initialize(
            model=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), config={**BASE, "ds_lgamp": {}}
        )
    return module


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


MODULES = {
    "a plain module": (
        lambda: nn.Linear(6, 6),
        "deepspeed.initialize got a Linear, but a ds_lgamp block works on a PipelineModule; pass one, or remove",
    ),
    "a module with a schedule of its own": (
        lambda: pipeline(linears(8), DualPipeVModule),
        "deepspeed.initialize got a DualPipeVModule",
    ),
    "layers that share a tensor": (lambda: pipeline([LayerSpec(Shared)] * 4), "are the same tensor; layers that share"),
    "a parameter outside of layers": (lambda: pipeline(kind=WithStray), "parameter stray belongs to no layer"),
    "parameters of half precision": (lambda: pipeline().bfloat16(), "bf16.enabled is false; set it or remove the cast"),
    "a module that has an engine": (used_module, "the PipelineModule has an engine already; build a new one"),
    "another axis": (of_three_axes, "the topology has 2 ranks on axis 'sequence'"),
}

OPTIMIZERS = {
    "none": (lambda module: None, "there is no optimizer; pass one to deepspeed.initialize or name one in the JSON"),
    "one of whole tensors": (
        lambda module: torch.optim.Adafactor(module.parameters()),
        "optimizer is Adafactor, which keeps sums over rows and columns of whole matrices; shards take one of",
    ),
    "foreign parameters": (
        lambda module: sgd([nn.Parameter(torch.ones(2, 3))]),
        "parameter group 0 holds a tensor of shape [2, 3] that belongs to no layer of the PipelineModule",
    ),
    "groups of other options on another rank": (
        lambda module: sgd([{"params": module.parameters(), "weight_decay": 0.1 * module.stage_id}]),
        "groups differ between pipeline ranks; give every rank the same groups",
    ),
}


def snapshot(module, optimizer):
    """Returns everything that a refusal must leave unchanged."""
    parameters = {name: (id(tensor), tensor.tolist()) for name, tensor in module.named_parameters()}
    groups = optimizer and [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    return type(module), parameters, groups, torch.get_rng_state().tolist()


def refusal(config, module=None, optimizer=None):
    """Returns the error of a refused initialization. Checks that it changed nothing."""
    module = pipeline() if module is None else module
    client = sgd(module.parameters()) if optimizer is None and "optimizer" not in config else None
    client = optimizer(module) if optimizer is not None else client
    before = snapshot(module, client)
    with pytest.raises(ConfigError) as error, quiet():
        deepspeed.initialize(model=module, optimizer=client, config=config)
    assert snapshot(module, client) == before
    return str(error.value)


def merged(changes):
    """Returns the base configuration with changes."""
    config = {key: value for key, value in {**BASE, "ds_lgamp": {}, **changes}.items() if value is not None}
    return {key: None if value is NULL else value for key, value in config.items()}


def run_all():
    prepare_rank()
    # Makes this test independent of the machine's fp16 support.
    get_accelerator().is_fp16_supported = lambda: False
    ds_lgamp.install()
    said = {("block", name): refusal({**BASE, "ds_lgamp": block}) for name, (block, _) in BLOCKS.items()}
    said |= {("config", name): refusal(merged(changes)) for name, (changes, _) in CONFIGS.items()}
    said |= {("module", name): refusal(merged({}), build()) for name, (build, _) in MODULES.items()}
    said |= {("optimizer", name): refusal(merged({}), None, make) for name, (make, _) in OPTIMIZERS.items()}
    for name, block in (("another block", {"resident_chunks": 1 + dist.get_rank()}), ("a block", {})):
        mine = {**BASE, "zero_optimization": {"stage": 1}}
        if name == "another block" or dist.get_rank() == 1:
            mine["ds_lgamp"] = block
        said["rank", name] = refusal(mine)
    said["rank", "another loss scale"] = refusal(merged({"fp16": {"loss_scale": 1 + dist.get_rank()}}))
    return said, still_trains()


def still_trains():
    """After all refusals, stock DeepSpeed and a block still train. Returns their losses."""
    losses = []
    for block in (None, {}):
        torch.manual_seed(4)
        module = pipeline(seed_layers=True, seed_fn=lambda value: torch.manual_seed(int(value)))
        config = {**BASE, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
        config |= {} if block is None else {"ds_lgamp": block}
        with quiet():
            engine = deepspeed.initialize(model=module, optimizer=sgd(module.parameters()), config=config)[0]
        losses.append(engine.train_batch(batches(2)).item())
    return losses


@pytest.fixture(scope="module")
def ranks():
    return run_on_ranks(2, run_all)


EXPECTED = {
    **{("block", name): words for name, (_, words) in BLOCKS.items()},
    **{("config", name): words for name, (_, words) in CONFIGS.items()},
    **{("module", name): words for name, (_, words) in MODULES.items()},
    **{("optimizer", name): words for name, (_, words) in OPTIMIZERS.items()},
    (
        "rank",
        "another block",
    ): "ds_lgamp is {'resident_chunks': 1} on rank 0 and {'resident_chunks': 2} on rank 1",
    ("rank", "another loss scale"): "fp16 is {'loss_scale': 1} on rank 0 and {'loss_scale': 2} on rank 1",
    ("rank", "a block"): "ds_lgamp is None on rank 0 and {} on rank 1; give every rank the same configuration",
}


@pytest.mark.parametrize("case", EXPECTED, ids=lambda case: f"{case[0]}: {case[1]}")
def test_every_rank_refuses_in_the_same_sentence(ranks, case):
    first, second = (said[case] for said, _ in ranks)
    assert first == second
    assert EXPECTED[case] in first and "\n" not in first


def test_after_refusals_training_goes_on_as_ever(ranks):
    for _, (stock, layered) in ranks:
        assert layered == pytest.approx(stock, rel=1e-6)


def without_a_seam():
    from deepspeed.runtime.pipe.engine import PipelineEngine

    del PipelineEngine._loss_stage_global_rank
    with pytest.raises(ConfigError) as error:
        ds_lgamp.install()
    return str(error.value), deepspeed.PipelineEngine is PipelineEngine


def test_a_deepspeed_without_the_seams_is_refused_by_its_version():
    said, untouched = run_on_ranks(1, without_a_seam)[0]
    assert deepspeed.__version__ in said and "_loss_stage_global_rank" in said and "\n" not in said
    assert untouched


COMMANDS = {
    "no such script": (["missing.py"], None, "'missing.py' is no file; name the script to run"),
    "no such configuration": (
        [str(EXAMPLE), "--deepspeed_config", "no.json"],
        None,
        "no.json cannot be read: ",
    ),
    "a configuration that is no JSON": (
        [str(EXAMPLE), "--deepspeed_config", "c.json"],
        "{'a' 1}",
        "c.json cannot be read: ",
    ),
    "a configuration that is a list": ([str(EXAMPLE), "--deepspeed_config", "c.json"], "[]", "c.json holds list"),
    "two blocks": (
        [str(EXAMPLE), "--deepspeed_config", "c.json"],
        '{"ds_lgamp": {}, "ds_lgamp": {}}',
        "c.json cannot be read: Duplicate keys in DeepSpeed config: ['ds_lgamp']",
    ),
    "a refused key, in a file with a comment": (
        [str(EXAMPLE), "--deepspeed_config=c.json"],
        '{"ds_lgamp": {}, # DeepSpeed reads HJSON\n"torch_autocast": {"enabled": true}}',
        "torch_autocast.enabled is True",
    ),
    "stages that do not divide the ranks": (
        [str(EXAMPLE), "--deepspeed_config", "c.json", "--stages", "2"],
        json.dumps(merged({})),
        "num_stages (2) must divide distributed world size (1); change one of them",
    ),
    "no data": (
        [str(ROOT / "launch" / "pretrain_gpt.py"), "--data-path", "no_data", "--deepspeed_config", "c.json"],
        json.dumps(merged({})),
        "--data-path is no_data, but no_data.tokenizer.json is missing; write it with launch/prepare_data.py",
    ),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_the_command_line_ends_with_a_sentence_and_no_traceback(case, tmp_path):
    words, config, expected = COMMANDS[case]
    if config is not None:
        (tmp_path / "c.json").write_text(config)
    environment = {
        **os.environ,
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
        **{"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    }
    done = subprocess.run(
        [sys.executable, "-m", "ds_lgamp", "run", *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert expected in last and "Traceback" not in done.stderr, done.stderr
