"""Reads and writes the state of models that train, on a rank."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param

import ds_lgamp
from ds_lgamp.integrations.deepspeed.plain import between_ranks
from testing.deepspeed_rank import prepare_rank
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, configuration, initialize
from tests.integrations.transformers.models import make, micro_batch


def adapted(name: str) -> Any:
    """Makes the model with an adapter that trains, in front of weights that do not."""
    torch.manual_seed(0)
    return peft.get_peft_model(make(name), peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))


def train_and_read(name: str, stage: int, block: dict[str, Any], folder: str) -> dict[str, Any]:
    """Trains the model, and returns what its state and its refusals show on this rank."""
    engine = trained(make(name), stage, block)
    model = engine.module
    seen: dict[str, Any] = {"weights": own_weights(model)}
    engine.save_checkpoint(f"{folder}/checkpoints", tag="trained")
    state = model.state_dict()
    seen["state"] = {key: value.clone() for key, value in state.items()}
    places = [value.data_ptr() for value in state.values()]
    seen["tied"] = [key for key, value in state.items() if places.count(value.data_ptr()) > 1]
    seen["accelerate"] = set(engine._zero3_consolidated_16bit_state_dict())
    model.save_pretrained(folder)
    engine.save_16bit_model(folder, "weights.bin")
    dist.barrier()
    whole = torch.load(Path(folder, "weights.bin"))
    model.load_state_dict({key: value + 1 for key, value in whole.items()})
    seen["loaded"] = own_weights(model)
    model.load_state_dict(seen["state"])
    seen["back"] = own_weights(model)
    seen["refusals"] = {
        "shapes": refusal(lambda: model.load_state_dict({key: value[:1] for key, value in whole.items()})),
        "assign": refusal(lambda: model.load_state_dict(whole, assign=True)),
        "generate": refusal(lambda: model.generate(torch.ones(1, 3, dtype=torch.long))),
        "direct": refusal(lambda: model(**micro_batch(0, 0, 0))),
        "forward": refusal(lambda: with_another_forward(engine)),
        "alone": refusal(model.state_dict if dist.get_rank() == 0 else lambda: train(engine, 1)),
    }
    return seen


def with_another_forward(engine: Any) -> None:
    """Calls the engine as Lightning's Trainer does, which lets the model's forward be another method meanwhile."""
    with patch.object(engine.module, "forward", lambda batch, _number: engine.module.training_step(batch)):
        engine(micro_batch(0, 0, 0), 0)


def saved_with_a_whole_module(stage: int, folder: str) -> dict[str, torch.Tensor]:
    """Saves an adapter that trains the head beside it. peft lists the names of the head's own parameters."""
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=2, target_modules="all-linear", modules_to_save=["lm_head"])
    engine = trained(peft.get_peft_model(make("Llama"), lora), stage, {"pipeline_ranks": 2})
    engine.module.save_pretrained(folder)
    return {name: value for name, value in own_weights(engine.module).items() if "modules_to_save" in name}


def saved_prompts(pipeline_ranks: int, stage: int, folder: str) -> torch.Tensor | None:
    """Trains virtual tokens, and saves them. Returns them where they are."""
    torch.manual_seed(0)
    tokens = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    engine = trained(peft.get_peft_model(make("Llama"), tokens), stage, {"pipeline_ranks": pipeline_ranks})
    engine.module.save_pretrained(folder)
    prompts = [value for name, value in own_weights(engine.module).items() if name.startswith("prompt_encoder")]
    # The Trainer calls it on one rank, with the state that all ranks have read.
    state = engine.module.state_dict()
    if dist.get_rank() == 0:
        engine.module.save_pretrained(f"{folder}/of_trainer", state_dict=state)
    return next(iter(prompts), None)


def values_of_other_ranks() -> dict[str, Any]:
    """Does with the parameters of layers on the other pipeline rank what does and does not need their values."""
    engine = trained(adapted("Llama"), 1, {"pipeline_ranks": 2})
    model = engine.module
    name, parameter = next(item for item in model.named_parameters() if not hasattr(item[1], "ds_id"))
    base = model.get_base_model()
    seen: dict[str, Any] = {"name": name, "printed": repr(parameter)}
    seen["about"] = (parameter.dtype, parameter.grad, isinstance(parameter, torch.nn.Parameter))
    model.to(engine.device)
    model.zero_grad()
    seen["refusals"] = {
        "norm": refusal(lambda: parameter.norm()),
        "data": refusal(lambda: parameter.data),
        "set": refusal(lambda: torch.nn.init.zeros_(parameter)),
        "copy": refusal(lambda: deepcopy(base)),
        "merge": refusal(model.merge_and_unload),
    }
    return seen


def read_alone(pipeline_ranks: int, stage: int, folder: str) -> dict[str, Any]:
    """Reads the state on all ranks, then on rank 0 alone, while the other waits, and on all ranks again."""
    engine = trained(make("GPT-2"), stage, {"pipeline_ranks": pipeline_ranks})
    model = engine.module
    first = {name: value.clone() for name, value in model.state_dict().items()}
    # Nobody else comes.
    with patch.object(between_ranks, "PATIENCE", 0.5):
        seen = _seen_alone(model, first, folder) if dist.get_rank() == 0 else {}
    dist.barrier()
    with torch.no_grad():
        own = {name: each for name, each in model.named_parameters() if hasattr(each, "ds_id")}
        changed = next(name for name in own if "ln_1.weight" in name) if stage < 3 else ""
        if changed:
            own[changed].add_(1)
    again = model.state_dict()
    train(engine, 1)
    seen["changed"] = {name for name, value in again.items() if not torch.equal(value, first[name])}
    seen["trained"] = all(not torch.equal(value, again[name]) for name, value in model.state_dict().items())
    seen["changed_here"] = changed
    return seen


def _seen_alone(model: Any, first: dict[str, torch.Tensor], folder: str) -> dict[str, Any]:
    """Returns what rank 0 sees alone of the state that was ``first``."""
    alone = model.state_dict()
    value = alone["transformer.wte.weight"]
    return {
        "names": list(alone) == list(first),
        "shapes": [value.shape for value in alone.values()] == [value.shape for value in first.values()],
        "types": {value.dtype for value in alone.values()} == {value.dtype for value in first.values()},
        "tied": alone["lm_head.weight"] is value,
        "inside": list(model.transformer.state_dict()) == [name[12:] for name in first if name[:12] == "transformer."],
        "refused": {
            "copy": refusal(value.clone),
            "save": refusal(lambda: torch.save(alone, f"{folder}/alone.bin")),
            "save_pretrained": refusal(lambda: model.save_pretrained(folder)),
            "load": refusal(lambda: make("GPT-2").load_state_dict(alone)),
        },
    }


def adapter_at_two_layouts(folder: str) -> dict[str, Any]:
    """Trains an adapter at one layout, saves it without frozen weights, and goes on at another layout."""
    first = trained(adapted("Llama"), 3, {"pipeline_ranks": 1})
    first.save_checkpoint(folder, exclude_frozen_parameters=True)
    first.module.save_pretrained(folder)
    expected = train(first, 1)
    other = trained(adapted("Llama"), 2, {"pipeline_ranks": 2}, steps=0)
    strict = refusal(lambda: other.load_checkpoint(folder))
    other.load_checkpoint(folder, load_module_strict=False)
    adapter = {name: value for name, value in first.module.state_dict().items() if "lora" in name}
    return {"expected": expected, "losses": train(other, 1), "strict": strict, "adapter": set(adapter)}


def with_longer_batches(folder: str) -> list[int]:
    """Goes on from a step of two micro-batches with steps of three. Returns the engine's steps after each call."""
    trained(make("Llama"), 2, {}, steps=1).save_checkpoint(folder)
    engine = initialize(make("Llama"), configuration(2, {}, MICRO_BATCHES + 1))
    engine.load_checkpoint(folder)
    steps = []
    for number in range(MICRO_BATCHES + 1):
        engine.backward(engine(**micro_batch(1, 0, number)).loss)
        engine.step()
        steps.append(engine.global_steps)
    return steps


def rolled_back(folder: str) -> dict[str, Any]:
    """Goes back to a checkpoint in the middle of a batch, and with a complete one. Returns the losses after the save,
    and those after going back."""
    engine = trained(make("Llama"), 2, {}, steps=1)
    engine.save_checkpoint(folder)
    expected = train(engine, 2)
    engine.backward(engine(**micro_batch(7, 0, 0)).loss)
    engine.step()
    engine.load_checkpoint(folder)
    losses = train(engine, 2)
    for number in range(MICRO_BATCHES - 1):
        engine.backward(engine(**micro_batch(7, 0, number)).loss)
        engine.step()
    engine(**micro_batch(7, 0, MICRO_BATCHES - 1))
    return {"expected": expected, "losses": losses, "complete": refusal(lambda: engine.load_checkpoint(folder))}


def trained(model: Any, stage: int, block: dict[str, Any], steps: int = 2) -> Any:
    """Returns the engine of ``model`` after some steps."""
    prepare_rank()
    ds_lgamp.install()
    engine = initialize(model, configuration(stage, block))
    train(engine, steps)
    return engine


def train(engine: Any, steps: int) -> list[float]:
    """Returns the mean of the ranks' losses of every step."""
    losses = []
    for _ in range(steps):
        total = torch.zeros(())
        for number in range(MICRO_BATCHES):
            loss = engine(**micro_batch(engine.global_steps, dist.get_rank(), number)).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def own_weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: safe_get_full_fp32_param(each) for name, each in model.named_parameters() if hasattr(each, "ds_id")}


def refusal(action: Callable[[], Any]) -> str:
    """Returns the message of the error that ``action`` raises; "" if it raises none."""
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""
