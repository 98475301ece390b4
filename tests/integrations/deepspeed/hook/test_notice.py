"""A block is heeded in every process that imports DeepSpeed, and without a block DeepSpeed stays stock."""

import argparse
import atexit
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from ds_lgamp import autoload
from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.hook import notice
from ds_lgamp.integrations.deepspeed.hook.initialize import partition_method_of
from testing import ROOT
from testing.deepspeed_rank import is_ours, prepare_rank, quiet
from testing.launching import ON_CPU
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.hook.test_install import attributes_of, differences
from tests.integrations.deepspeed.models import Training, pipeline_module
from tests.integrations.deepspeed.running import Layout, json_config
from tests.slow import slow_except

PLAIN = json_config(Training(), Layout(1, 1, 1, None))
LAYERED = {**PLAIN, "ds_lgamp": {}}
LOOK_FOR_A_BLOCK = {"initialize", "DeepSpeedEngine.__init__", "PipelineModule.__init__"}


def prepare():
    """Prepares a rank as torch does that finds the entry point of this package. Nothing else is installed."""
    autoload.wait_for_hosts()
    prepare_rank()


def engine_for(**arguments):
    import deepspeed

    with quiet():
        module = pipeline_module(Training(), 1)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        return deepspeed.initialize(model=module, optimizer=optimizer, **arguments)[0]


def hooks():
    return sys.excepthook, atexit._ncallbacks()


def changed_attributes():
    prepare_rank()
    notice.notice_nothing()
    before, hooks_before = attributes_of("deepspeed"), hooks()
    autoload.wait_for_hosts()
    engine = type(engine_for(config=PLAIN)).__name__
    during = attributes_of("deepspeed")
    changed = {during[key] for key in before.keys() & during.keys() if before[key] is not during[key]}
    functions = {value.__qualname__ for value in changed if callable(value)}
    notice.notice_nothing()
    left = differences(before, attributes_of("deepspeed")) & differences(during, attributes_of("deepspeed"))
    return engine, functions, hooks() == hooks_before, left


def test_without_a_block_three_functions_look_for_one_and_all_else_is_stock():
    ((engine, functions, stock_hooks, left),) = run_on_ranks(1, changed_attributes)
    assert engine == "PipelineEngine"
    assert functions == LOOK_FOR_A_BLOCK
    assert stock_hooks
    assert left == set()


def engines_by_place_of_the_configuration(folder):
    prepare()
    path = folder / "ds_config.json"
    path.write_text(json.dumps(LAYERED))
    args = argparse.Namespace(deepspeed_config=str(path))
    places = [{"config": LAYERED}, {"config": str(path)}, {"config_params": LAYERED}, {"args": args}]
    return [is_ours(engine_for(**place)) for place in places]


def test_the_block_is_found_wherever_deepspeed_finds_its_configuration(tmp_path):
    assert run_on_ranks(1, engines_by_place_of_the_configuration, tmp_path) == [[True] * 4]


def engines_by_environment(folder):
    prepare()
    block = {"chunks_per_rank": 2}
    files = {"block.json": block, "ds_config.json": {**PLAIN, "ds_lgamp": block}, "list.json": []}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    args = argparse.Namespace(deepspeed_config=PLAIN)
    texts = json.dumps(block), folder / "block.json", folder / "ds_config.json"
    cases = [*((text, {"config_params": PLAIN}) for text in texts), (json.dumps(block), {"args": args})]
    cases.append((json.dumps(block), {"config_params": {**PLAIN, "ds_lgamp": block}}))
    cases += [("{}", {"config_params": {**PLAIN, "ds_lgamp": block}})]
    cases += [(text, {"config_params": PLAIN}) for text in ("{", folder / "none.json", folder / "list.json")]
    said = []
    for text, arguments in cases:
        os.environ[autoload.VARIABLE] = str(text)
        try:
            said.append(engine_for(**arguments).lgamp.settings.chunks_per_rank)
        except ConfigError as refused:
            said.append(str(refused))
    assert args.deepspeed_config is PLAIN and "ds_lgamp" not in PLAIN
    return said


def test_the_environment_may_hold_or_name_the_block_of_a_script_that_makes_its_configuration(tmp_path):
    ((*chunks, both, torn, absent, other),) = run_on_ranks(1, engines_by_environment, tmp_path)
    assert chunks == [2] * 5
    assert both.startswith("the configuration has a ds_lgamp block and DS_LGAMP_BLOCK another one; remove one of them")
    assert torn.startswith("DS_LGAMP_BLOCK { cannot be read: Expecting property name")
    assert re.match(r"DS_LGAMP_BLOCK \S+none.json cannot be read: .*No such file", absent)
    assert re.match(r"DS_LGAMP_BLOCK \S+list.json holds list; write a block such as \{\}", other)


def engines_made_by_hand():
    prepare()
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig

    class Own(deepspeed.PipelineEngine):
        """The engine of a script that calls no ``deepspeed.initialize``."""

    said = []
    for engine, config in ((deepspeed.PipelineEngine, LAYERED), (Own, LAYERED), (Own, PLAIN)):
        with quiet():
            module = pipeline_module(Training(), 1)
        options = {"optimizer": torch.optim.SGD(module.parameters(), 0.1), "mpu": module.mpu(), "args": None}
        try:
            engine(model=module, config=config, config_class=DeepSpeedConfig(config, module.mpu()), **options)
            said.append("stock")
        except ConfigError as refused:
            said.append(str(refused))
    return said


def test_an_engine_made_without_initialize_does_not_ignore_the_block():
    ((stock, own, without),) = run_on_ranks(1, engines_made_by_hand)
    for name, said in (("PipelineEngine", stock), ("Own", own)):
        assert said.startswith(f"a {name} made without deepspeed.initialize would ignore the ds_lgamp block; call ")
    assert without == "stock"


def method_of_subclasses():
    prepare()
    from deepspeed.pipe import PipelineModule

    class Cuts(PipelineModule):
        def __init__(self, layers):
            super().__init__(layers, num_stages=1, loss_fn=torch.nn.MSELoss(), partition_method="type:Linear")

        def _partition_layers(self, method="uniform"):
            # Cuts as it likes.
            super()._partition_layers("uniform")

    with quiet():
        return partition_method_of(Cuts([torch.nn.Linear(2, 2) for _ in range(3)]))


def test_the_partition_method_of_a_subclass_is_remembered():
    assert run_on_ranks(1, method_of_subclasses) == ["type:Linear"]


def made_accelerators(config, block_of_environment):
    """Returns what each way to set DeepSpeed aside says; None if it says nothing."""
    prepare()
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    def make(**arguments):
        Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), **arguments)

    def train():
        os.environ["ACCELERATE_USE_CPU"] = "1"
        model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32))
        Trainer(model, TrainingArguments("unused", deepspeed=config, report_to="none"))

    os.environ[autoload.VARIABLE] = block_of_environment
    ways = {
        "an argument": lambda: make(cpu=True),
        "several plugins": lambda: Accelerator(
            deepspeed_plugins={name: DeepSpeedPlugin(hf_ds_config=config) for name in ("a", "b")}, cpu=True
        ),
        "an Accelerator ahead": lambda: (Accelerator(cpu=True), make()),
        "the Trainer": train,
        "nothing": make,
    }
    said = {}
    for name, way in ways.items():
        AcceleratorState._reset_state(reset_partial_state=True)
        for variable in ("ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED"):
            os.environ.pop(variable, None)
        try:
            way()
            said[name] = None
        except ConfigError as refused:
            said[name] = str(refused)
    return said


@pytest.mark.parametrize(
    ("block", "block_of_environment", "is_refused"),
    [({}, "", True), (None, "{}", True), ({"enabled": False}, "", False), (None, "", False)],
    ids=["of the configuration", "of the environment", "disabled", "none"],
)
def test_a_block_is_refused_where_accelerate_sets_deepspeed_aside(block, block_of_environment, is_refused):
    config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}}
    config |= {} if block is None else {"ds_lgamp": block}
    (said,) = run_on_ranks(1, made_accelerators, config, block_of_environment)
    assert said.pop("nothing") is None
    for sentence in said.values():
        assert (sentence is not None) == is_refused, said
        if is_refused:
            assert re.match(r"Accelerate trains without DeepSpeed \(its distributed_type is (NO|MULTI_CPU)\)", sentence)
            assert "would ignore the ds_lgamp block; unset ACCELERATE_USE_CPU, call PartialState(cpu=True)" in sentence


@pytest.fixture
def environment(tmp_path):
    """The environment of processes in which torch finds the entry point of this package, as after its installation."""
    found = tmp_path / "ds_lgamp-0.dist-info"
    found.mkdir()
    (found / "entry_points.txt").write_text("[torch.backends]\nds_lgamp = ds_lgamp.autoload:wait_for_hosts\n")
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: ds_lgamp\nVersion: 0\n")
    return {**os.environ, **ON_CPU, "PYTHONPATH": f"{tmp_path}:{ROOT}"}


def run_python(code, environment):
    # The folder in which Python starts comes first, and a checkout may hold the metadata of an older installation.
    folder = environment["PYTHONPATH"].split(":")[0]
    words = [sys.executable, "-c", code]
    return subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, timeout=180)


def test_a_process_without_hosts_imports_nothing_more(environment):
    code = "import sys, torch; print(*sorted(name for name in sys.modules if name.startswith('ds_lgamp')))"
    assert run_python(code, environment).stdout.split() == ["ds_lgamp", "ds_lgamp.autoload", "ds_lgamp.version"]
    off = run_python(code, {**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert off.returncode == 0 and off.stdout.split() == []


INSTALLS_ITSELF = """
import ds_lgamp
ds_lgamp.install()
from accelerate import Accelerator, DeepSpeedPlugin
config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}, "ds_lgamp": {}}
Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), cpu=True)
"""


def test_hosts_are_waited_for_where_torch_calls_nobody(environment):
    done = run_python(INSTALLS_ITSELF, {**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert done.returncode == 1 and "ConfigError: Accelerate trains without DeepSpeed (its " in done.stderr


TRAINS = """
import torch
parameter = torch.nn.Parameter(torch.ones(1))
parameter.sum().backward()
if {steps}:
    torch.optim.SGD([parameter], 0.1).step()
print("trained")
{end}
"""


@pytest.mark.parametrize(
    ("block", "steps", "end", "status"),
    [
        pytest.param("{}", True, "", 2, id="trains"),
        pytest.param("", True, "", 0, id="has no block", marks=pytest.mark.slow),
        pytest.param("{}", False, "", 0, id="trains nothing"),
        pytest.param("{}", True, "raise KeyError", 1, id="fails"),
    ],
)
def test_a_process_that_trains_without_an_engine_for_the_block_of_the_environment_fails(
    block, steps, end, status, environment
):
    done = run_python(TRAINS.format(steps=steps, end=end), {**environment, autoload.VARIABLE: block})
    assert done.returncode == status, done.stderr
    assert done.stdout == "trained\n"
    assert ("nobody called deepspeed.initialize, which would take the block of DS_LGAMP_BLOCK" in done.stderr) == (
        status == 2
    )


@pytest.mark.parametrize(
    ("config", "status"),
    slow_except(
        [('{"ds_lgamp": {}}', 2)],
        [('{"ds_lgamp": {}}', 2), ('{"ds_lgamp": {"enabled": false}}', 0), ("{}", 0)],
        several=True,
    ),
)
def test_a_process_that_trains_without_an_engine_for_the_block_of_accelerates_configuration_fails(
    config, status, environment, tmp_path
):
    file = tmp_path / "ds_config.json"
    file.write_text(config)
    done = run_python(TRAINS.format(steps=True, end=""), {**environment, autoload.CONFIG_FILE: str(file)})
    assert done.returncode == status, done.stderr
    assert ("would take the block of ACCELERATE_DEEPSPEED_CONFIG_FILE" in done.stderr) == (status == 2)
