"""Models of transformers whose experts DeepSpeed's AutoEP divides among ranks train as in one process."""

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import peft
import pytest
import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.pipe import PipelineModule
from transformers import AutoModelForCausalLM

import ds_lgamp
from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.user_script import finish_engines
from testing import SCRIPTS
from testing.deepspeed_rank import is_ours, prepare_rank, quiet
from testing.launching import torchrun
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.moe import BATCH, STEPS, course_alone, refusal_on_rank
from tests.integrations.deepspeed.plain.accelerated import AUTO, WORDS
from tests.integrations.deepspeed.test_expert_parallelism import assert_same, collectives_on_rank
from tests.integrations.transformers.models import make, micro_batch_of
from tests.slow import slow_except


class Mode(NamedTuple):
    """How a model is trained."""

    name: str
    expert_ranks: int
    pipeline_ranks: int
    stage: int
    config: Any = None
    """More of the configuration, and ``block`` and ``experts`` for more of these sections."""
    is_stock: bool = False
    """Whether stock DeepSpeed trains, without a block."""
    is_spread: bool = False
    """Whether ``zero.Init`` has spread the weights over all ranks."""
    change: Callable[[Any], Any] | None = None
    """Makes another model of it."""
    parameters: Callable[[Any], Any] | None = None
    """What the script passes as ``model_parameters``, if DeepSpeed makes the optimizer."""

    def configuration(self, own: int) -> dict[str, Any]:
        more = dict(self.config or {})
        block = {"ds_lgamp": {"pipeline_ranks": self.pipeline_ranks, **more.pop("block", {})}}
        experts = {"enabled": True, "autoep_size": self.expert_ranks}
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": own,
            "gradient_clipping": 1e9,
            "zero_optimization": {"stage": self.stage, **more.pop("zero_optimization", {})},
            "zero_allow_untested_optimizer": True,
            "expert_parallel": {**experts, **more.pop("experts", {})},
            **({} if self.is_stock else block),
            **more,
        }


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    # Adam would make large steps of the rounding of small gradients, and tokens would choose other experts.
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(name: str, compute: Callable[..., Any], step: int, number: int) -> torch.Tensor:
    return compute(**micro_batch_of(name, step, 0, number)).loss


@cache
def alone(name: str) -> list[tuple[float, float]]:
    """Trains in this process. Returns the mean loss and the norm of the gradient of every step."""
    model = make(name)
    return course_alone(model, optimizer_of(model), lambda step, number: loss_of(name, model, step, number))


def train_on_rank(
    mode: Mode,
    steps: range = range(STEPS),
    load: str | None = None,
    save: str | None = None,
    written: str | None = None,
) -> list[tuple[float, float]]:
    """Trains on this rank, from the checkpoint ``load`` on, and saves the checkpoint ``save``, and the model as
    ``written``. Returns what :func:`alone` does, of its own micro-batches."""
    prepare_rank()
    ds_lgamp.install()
    own = BATCH // dist.get_world_size()
    first = dist.get_rank() * own
    model = make(mode.name)
    if mode.change is not None:
        model = mode.change(model)
    if load is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    config = mode.configuration(own)
    if mode.is_spread:
        of_stage = {key: config[key] for key in ("train_micro_batch_size_per_gpu", "zero_optimization")}
        deepspeed.zero.Init(module=model, config_dict_or_path=of_stage)
        assert not any(parameter.numel() for parameter in model.parameters())
    of_script = {"optimizer": optimizer_of(model)}
    if mode.parameters is not None:
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
        of_script = {"model_parameters": mode.parameters(model)}
    with quiet():
        engine = deepspeed.initialize(model=model, config=config, **of_script)[0]
    assert is_ours(engine) != mode.is_stock
    assert any(isinstance(part, AutoEPMoELayer) for part in engine.module.modules())
    if load is not None:
        engine.load_checkpoint(load)
    course = []
    for step in steps:
        total = 0.0
        for number in range(first, first + own):
            loss = loss_of(mode.name, engine, step, number)
            engine.backward(loss)
            engine.step()
            total += loss.item()
        course.append((total / own, float(engine.get_global_grad_norm())))
    if save is not None:
        engine.save_checkpoint(save)
    if written is not None:
        model.save_pretrained(written)
    finish_engines()
    return course


def course_of(ranks: int, mode: Mode, *given: Any) -> list[tuple[float, float]]:
    """Trains on ``ranks``. Returns the mean loss of all, and the norm of the gradient, of every step."""
    courses = run_on_ranks(ranks, train_on_rank, mode, *given)
    return [(sum(loss for loss, _ in step) / ranks, step[0][1]) for step in zip(*courses)]


MIXTRAL, QWEN, DEEPSEEK = "Mixtral with balance", "Qwen3-MoE with balance", "DeepSeek-V3"
DEFAULT = {"shared experts in two pipelines, stage 3": (4, Mode(DEEPSEEK, 2, 2, 3))}
SLOW = {"two ranks, stage 2": (2, Mode(MIXTRAL, 2, 1, 2))} | {
    f"{name}, {mode}": (4, Mode(name, *mode))
    for name in (MIXTRAL, QWEN, DEEPSEEK)
    for mode in [(2, 1, 0), (2, 1, 1), (2, 1, 2), (2, 1, 3), (4, 1, 0), (4, 1, 3), (1, 2, 1), (2, 2, 1), (2, 2, 3)]
}


@pytest.mark.parametrize("case", [*DEFAULT, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_losses_and_norms_are_those_of_one_process(case):
    ranks, mode = {**DEFAULT, **SLOW}[case]
    assert_same(course_of(ranks, mode), alone(mode.name))


OPTIONS: dict[str, tuple[Mode, float]] = {
    "the optimizer on the host": (
        Mode(MIXTRAL, 2, 1, 2, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
        1e-6,
    ),
    "spread by zero.Init": (Mode(DEEPSEEK, 2, 2, 3, is_spread=True), 1e-6),
    "experts one by one": (Mode(MIXTRAL, 2, 1, 2, {"experts": {"use_grouped_mm": False}}), 1e-6),
    "no recomputation": (Mode(QWEN, 2, 2, 1, {"block": {"recompute": "none"}}), 1e-6),
    "all outputs": (Mode(MIXTRAL, 2, 1, 3, {"block": {"outputs": "all"}}), 1e-6),
    "copies beside each other": (Mode(DEEPSEEK, 2, 1, 1, {"use_data_before_expert_parallelism": True}), 1e-6),
    "bf16": (Mode(MIXTRAL, 2, 2, 3, {"bf16": {"enabled": True}}), 2e-2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OPTIONS)
def test_options_compute_the_same(case):
    mode, precision = OPTIONS[case]
    assert_same(course_of(4, mode), alone(mode.name), precision)


@pytest.mark.slow
def test_losses_and_norms_are_those_of_stock():
    # Its way to the logits of routers fails with transformers 5.23, and this model has none.
    mode = Mode(DEEPSEEK, 2, 1, 3)
    assert_same(course_of(2, mode), course_of(2, mode._replace(is_stock=True)))


def groups_of(model: Any) -> tuple[dict[str, Any], ...]:
    """Returns one group that lists its parameters later, and one with the experts."""
    inside, outside = ([each for name, each in model.named_parameters() if (".mlp." in name) == of] for of in (1, 0))
    return {"params": iter(outside)}, {"params": inside}


def tuple_of(model: Any) -> tuple[Any, ...]:
    return tuple(model.parameters())


@pytest.mark.parametrize("parameters", slow_except([groups_of], [groups_of, tuple_of]))
def test_parameters_train_in_whatever_the_script_lists_them(parameters):
    mode = Mode(MIXTRAL, 2, 1, 2, parameters=parameters)
    assert_same(course_of(2, mode), alone(mode.name))


CHUNKS, RESIDENT = 3, 2


def test_a_step_gathers_and_reduces_experts_as_often_as_the_rest_of_their_chunk():
    mode = Mode(MIXTRAL, 2, 1, 3, {"block": {"chunks_per_rank": CHUNKS}})
    experts = [part for part in make(mode.name).modules() if type(part).__name__ == "MixtralExperts"]
    elements = sum(parameter.numel() for parameter in experts[0].parameters()) // mode.expert_ranks
    for seen in run_on_ranks(4, collectives_on_rank, train_on_rank, mode):
        for kind, times in (("gather", 2 * CHUNKS - RESIDENT), ("reduce", CHUNKS)):
            of = {size: Counter[int]() for size in (2, 4)}
            for (each, size, whole), number in seen.items():
                if each == kind:
                    of[size][whole] += number
            # The first and the last chunk have a block each, and the one between them two.
            assert set(of[2]) == {elements, 2 * elements}
            assert of[2].total() == of[4].total() == times


def test_save_pretrained_writes_the_layers_that_were_replaced(tmp_path):
    mode = Mode(DEEPSEEK, 2, 1, 3)
    *_, (loss, _) = course_of(2, mode, range(2), None, None, str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.state_dict().keys() == make(mode.name).state_dict().keys()
    losses = [loss_of(mode.name, model, 2, number).item() for number in range(BATCH)]
    assert sum(losses) / BATCH == pytest.approx(alone(mode.name)[2][0], rel=1e-6)
    assert sum(losses) / BATCH != pytest.approx(loss, rel=1e-6)


def trained(folder: Path, name: str, config: dict[str, Any], words: str) -> list[float]:
    """Lets a script of the Trainer, which does not know ds_lgamp, train the model in ``folder``, and save it as
    ``name``. Returns what it logs."""
    (folder / f"{name}.json").write_text(json.dumps(config))
    script = [str(SCRIPTS / "trains_with_trainer.py"), "--model", str(folder / "model")]
    files = ["--deepspeed", str(folder / f"{name}.json"), "--output_dir", str(folder / name)]
    torchrun(2, ["-m", "ds_lgamp", "run", *script, *files, *WORDS, *TRAINER.split(), *words.split()])
    history = json.loads((folder / name / "history.json").read_text())
    return [entry[key] for key in ("loss", "grad_norm", "eval_loss") for entry in history if key in entry]


TRAINER = "--prediction_loss_only --max_steps 4 --save_steps 2 --eval_strategy steps --eval_steps 2"


@pytest.mark.slow
def test_a_trainer_trains_evaluates_saves_and_resumes(tmp_path):
    make(MIXTRAL, vocab_size=64).save_pretrained(tmp_path / "model")
    config = {**AUTO, "optimizer": {"type": "SGD", "params": {"lr": "auto"}}, "ds_lgamp": {"pipeline_ranks": 1}}
    wanted = trained(tmp_path, "whole", config, "")
    config["expert_parallel"] = {"enabled": True, "autoep_size": 2}
    assert trained(tmp_path, "divided", config, "--save_strategy steps") == pytest.approx(wanted, rel=1e-6)
    resumed = f"--resume_from_checkpoint {tmp_path / 'divided' / 'checkpoint-2'}"
    assert trained(tmp_path, "resumed", config, resumed) == pytest.approx(wanted, rel=1e-6)
    own, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "resumed"))
    assert own.keys() == other.keys()
    assert all(torch.allclose(value, other[name], rtol=1e-5, atol=1e-7) for name, value in own.items())


CHECKPOINTS = {
    "two expert ranks to four": ((2, Mode(MIXTRAL, 2, 1, 2)), (4, Mode(MIXTRAL, 4, 1, 3))),
    "two pipelines to one rank": ((4, Mode(QWEN, 2, 2, 3)), (1, Mode(QWEN, 1, 1, 0))),
    "one rank to two pipelines": ((1, Mode(DEEPSEEK, 1, 1, 0)), (4, Mode(DEEPSEEK, 2, 2, 1))),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_checkpoint_goes_on_with_another_number_of_expert_ranks(case, tmp_path):
    (before, mode), (after, other) = CHECKPOINTS[case]
    course = course_of(before, mode, range(1), None, str(tmp_path))
    course += course_of(after, other, range(1, STEPS), str(tmp_path))
    assert_same(course, alone(mode.name))


GPT_OSS = {
    "moe_layer_pattern": r"model\.layers\.\d+\.mlp",
    "router_pattern": "router",
    "expert_activation": "swiglu_oai",
}
PEFT = {"moe_layer_pattern": r"base_model\.model\.model\.layers\.\d+\.mlp"}


def with_noise(model: Any) -> Any:
    model.model.layers[1].mlp.jitter_noise = 0.1
    return model


def with_hook(model: Any) -> Any:
    model.model.layers[1].mlp.experts.register_forward_hook(lambda part, given, output: 2 * output)
    return model


def with_gradient_hook(model: Any) -> Any:
    model.model.layers[1].mlp.gate.weight.register_hook(lambda gradient: 2 * gradient)
    return model


def with_lora(model: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_parameters=["mlp.gate.weight"]))


REFUSED = {
    "a size that does not divide the ranks": (
        *(3, Mode("Mixtral", 2, 1, 1)),
        "expert_parallel.autoep_size, is 2, which does not divide the 3 data-parallel ranks",
    ),
    "a size that does not divide the experts": (
        *(3, Mode("Mixtral", 3, 1, 1)),
        "expert_parallel.autoep_size is 3, which does not divide the 4 experts of model.layers.0.mlp",
    ),
    "a model without experts": (2, Mode("Llama", 2, 1, 1), "the LlamaForCausalLM has no experts that DeepSpeed's"),
    "a preset that stock lacks": (
        *(2, Mode("Mixtral", 2, 1, 1, {"experts": {"preset_model": "gpt_oss"}})),
        "expert_parallel.preset_model is 'gpt_oss'; use one of mixtral, ",
    ),
    "a preset that would drop biases": (
        *(2, Mode("GPT-OSS", 2, 1, 1, {"experts": GPT_OSS})),
        "DeepSpeed would drop the parameter or buffer experts.gate_up_proj_bias in model.layers.0.mlp",
    ),
    "noise of a router": (2, Mode("Mixtral", 2, 1, 1, change=with_noise), "would drop the router_jitter_noise 0.1"),
    "a hook of experts": (2, Mode("Mixtral", 2, 1, 1, change=with_hook), "would drop hooks of experts"),
    "a hook of gradients": (2, Mode("Mixtral", 2, 1, 1, change=with_gradient_hook), "would drop hooks of gate"),
    "LoRA on a router": (
        *(2, Mode("Mixtral", 2, 1, 1, {"experts": PEFT}, change=with_lora)),
        "would drop the parameter or buffer gate.base_layer.weight",
    ),
    "LoRA whose names no preset knows": (
        *(2, Mode("Mixtral", 2, 1, 1, change=with_lora)),
        "begins with base_model.model inside a PeftModel",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_in_one_sentence(case):
    ranks, mode, sentence = REFUSED[case]
    for message in run_on_ranks(ranks, refusal_on_rank, train_on_rank, mode):
        assert sentence in message and ". " not in message


def refusal_of_pipeline_on_rank() -> str:
    prepare_rank()
    ds_lgamp.install()
    config = {**Mode("", 1, 1, 1).configuration(1), "ds_lgamp": {}}
    with quiet(), pytest.raises(ConfigError) as refused:
        deepspeed.initialize(model=PipelineModule([torch.nn.Linear(2, 2)], 1, loss_fn=torch.sum), config=config)
    return str(refused.value)


def test_a_pipeline_module_is_refused():
    assert "DeepSpeed finds no experts in a PipelineModule" in run_on_ranks(1, refusal_of_pipeline_on_rank)[0]
