"""Runs programs of PyPI that bring their own trainer, unedited and by their own launch lines, each in an environment of
its own: LLaMA-Factory, ms-swift, sentence-transformers, Lightning and axolotl.

The environment has ds_lgamp, too, and the configuration of DeepSpeed has a block; nothing else differs from stock. The
models and their vocabulary are small and made here; the text is this project's documentation.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

from testing.launching import ON_CPU, ROOT, recorded, run
from testing.public.outcome import Case, compared, without_block
from testing.public.transformers_scripts import (
    CAUSAL,
    MASKED,
    RANKS,
    STEPS,
    make_material,
    write_config,
)

LLAMA = "llama"
ROWS, WORDS, MIDDLE = 64, 6, STEPS // 2
SPLIT = {"pipeline_ranks": 2, "chunks_per_rank": 2}
SECONDS = 600.0
"""The longest time of a training; machines of tests may be busy."""
Arguments = Mapping[str, Any]
TRAINED: Arguments = {
    "max_steps": STEPS,
    "save_steps": MIDDLE,
    "logging_steps": 1,
    "learning_rate": 0.001,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "report_to": "none",
    "use_cpu": True,
}
"""The Trainer's arguments, which all programs take by these names."""


class Training(NamedTuple):
    """A kind of training."""

    arguments: Arguments
    """What the program gets besides TRAINED."""
    block: Mapping[str, Any] = {}
    """What its block has besides a layout."""
    stock: int = 2
    """The stage at which stock trains."""
    goes_on: bool = True
    """Whether the program itself goes on from a checkpoint with the batches that would have followed."""


class Stack(NamedTuple):
    """A program."""

    package: str
    """Its name on PyPI."""
    launcher: str
    """The file in the environment's ``bin`` that starts it."""
    trainings: Mapping[str, Training]
    command: Callable[[Path, Path, Arguments], list[str]]
    """Returns its launch line, given the path of ``launcher``, the folder of the material, and arguments."""


def cases(stack: Stack, environment: Path, folder: Path) -> Iterable[Case]:
    """Returns the cases of ``stack`` on two ranks. Stock trains at stage 2. The losses of all steps are compared."""
    sizes = {name: "auto" for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")}
    material = cache(partial(write_material, folder))

    def train(name: str, stage: int, block: Mapping[str, Any] | None, **resumed: str) -> Path:
        material()
        training = stack.trainings[name]
        output = folder / "trained" / str(len(list(folder.glob("trained/*"))))
        record = folder / "recorded" / output.name
        traced = {"trace": str(record), "trace_steps": f"{MIDDLE if resumed else 1}:{STEPS}"}
        ours = {} if block is None else {"ds_lgamp": {**training.block, **block, **traced}}
        config = write_config(folder, {**sizes, "zero_optimization": {"stage": stage}, **ours})
        named = {"deepspeed": str(config), "output_dir": str(output), **resumed}
        words = stack.command(environment / "bin" / stack.launcher, folder, {**TRAINED, **training.arguments, **named})
        run(words, SECONDS, variables(environment, folder), folder)
        assert block is None or recorded(record), "the program trained, but not with the block"
        return output

    stages = {name: training.stock for name, training in stack.trainings.items()}
    stock = cache(lambda name: without_block(lambda: _losses(train(name, stages[name], None))))

    def compare(name: str, stage: int, block: Mapping[str, Any]) -> str:
        alone = stock(name)
        return compared(_losses(train(name, stage, block)), alone)

    def compare_resumed(name: str) -> str:
        alone = stock(name)
        saved = train(name, 3, SPLIT) / f"checkpoint-{MIDDLE}"
        return compared(_losses(train(name, 3, {}, resume_from_checkpoint=str(saved))), alone)

    for name, stage in stages.items():
        yield Case(f"{name}, P2, ZeRO-{stage}", partial(compare, name, stage, SPLIT))
        yield Case(f"{name}, W{RANKS}, ZeRO-3", partial(compare, name, 3, {}))
        if stack.trainings[name].goes_on:
            yield Case(f"{name}, P2, ZeRO-3, resumed as W{RANKS}", partial(compare_resumed, name))


def version_of(package: str, environment: Path) -> str:
    """Returns the version of ``package`` in ``environment``."""
    folders = [str(path) for path in environment.glob("lib/python*/site-packages")]
    return next((each.version for each in distributions(name=package, path=folders)), "unknown")


def variables(environment: Path, folder: Path) -> dict[str, str]:
    """Returns the environment's variables: those of a shell in which it is active, and that of offline machines."""
    path = f"{environment / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    offline = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    return {**ON_CPU, **offline, "PATH": path, "PYTHONPATH": str(ROOT), "NPROC_PER_NODE": str(RANKS)}


def _losses(output: Path) -> list[float]:
    state = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def _llama_factory(launcher: Path, folder: Path, arguments: Arguments) -> list[str]:
    path = folder / "train.yaml"
    path.write_text(_yaml(arguments))
    # The first asks for several ranks, the second allows releases of transformers that are newer than the program.
    return ["env", "FORCE_TORCHRUN=1", "DISABLE_VERSION_CHECK=1", str(launcher), "train", str(path)]


def _swift(launcher: Path, folder: Path, arguments: Arguments) -> list[str]:
    return [str(launcher), "sft", *flags(arguments)]


def _sentence_transformers(launcher: Path, folder: Path, arguments: Arguments) -> list[str]:
    return [*torchrun(launcher), str(ROOT / "testing" / "scripts" / "sentences.py"), *flags(arguments)]


def _lightning(launcher: Path, folder: Path, arguments: Arguments) -> list[str]:
    return [*torchrun(launcher), str(ROOT / "testing" / "scripts" / "lightning_module.py"), *flags(arguments)]


def _axolotl(launcher: Path, folder: Path, arguments: Arguments) -> list[str]:
    others = {"per_device_train_batch_size": "micro_batch_size"}
    theirs = {
        others.get(name, name): value for name, value in arguments.items() if name not in ("report_to", "use_cpu")
    }
    path = folder / "train.yaml"
    path.write_text(_yaml(theirs))
    # What "axolotl train" starts. On a CPU, Accelerate would believe that every rank is alone.
    program = ["-m", "testing.accelerate_cpu", "-m", "axolotl.cli.train", str(path)]
    return [*torchrun(launcher.with_name("python")), *program]


def torchrun(python: Path) -> list[str]:
    return [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)]


def _yaml(arguments: Arguments) -> str:
    return "\n".join(f"{name}: {_word(value)}" for name, value in arguments.items())


def flags(arguments: Arguments) -> list[str]:
    """Returns ``arguments`` as words of a command line."""
    return [word for name, value in arguments.items() for word in (f"--{name}", _word(value))]


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def write_material(folder: Path) -> None:
    """Writes models and data into ``folder``, under the relative names that the arguments have."""
    text, _ = make_material(folder)
    _save_llama(folder)
    words = text.read_text().split()
    parts = [" ".join(words[start : start + WORDS]) for start in range(0, 3 * ROWS * WORDS, WORDS)]
    rows = [
        dict(zip(("instruction", "chosen", "rejected"), parts[start : start + 3])) for start in range(0, 3 * ROWS, 3)
    ]
    data = folder / "data"
    data.mkdir()
    (data / "pairs.json").write_text(json.dumps(rows))
    talks = [[("user", row["instruction"]), ("assistant", row["chosen"])] for row in rows]
    messages = [{"messages": [{"role": role, "content": said} for role, said in talk]} for talk in talks]
    (data / "messages.jsonl").write_text("\n".join(map(json.dumps, messages)))
    named = {"file_name": "pairs.json", "columns": {"prompt": "instruction", "response": "chosen"}}
    ranked = {
        **named,
        "ranking": True,
        "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"},
    }
    (data / "dataset_info.json").write_text(json.dumps({"answers": named, "preferences": ranked}))


def _save_llama(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = PreTrainedTokenizerFast.from_pretrained(folder / CAUSAL)
    vocabulary.save_pretrained(folder / LLAMA)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(vocabulary), **shape, bos_token_id=0, eos_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder / LLAMA)


_FACTORY: Arguments = {
    **{"model_name_or_path": LLAMA, "dataset_dir": "data", "template": "default", "cutoff_len": 64},
    **{"stage": "sft", "dataset": "answers", "finetuning_type": "full", "do_train": True, "plot_loss": False},
    # With transformers from 5.7 on, LLaMA-Factory 0.9.5 fails when it checkpoints activations, also without a block.
    "disable_gradient_checkpointing": True,
}
_SWIFT: Arguments = {
    **{"model": LLAMA, "model_type": "llama", "template": "default", "dataset": "data/messages.jsonl"},
    **{"torch_dtype": "float32", "fp16": False, "bf16": False, "max_length": 64, "tuner_type": "full"},
    **{"check_model": False, "use_hf": True, "add_version": False},
}
_AXOLOTL: Arguments = {
    **{"base_model": LLAMA, "tokenizer_type": "AutoTokenizer", "special_tokens": "{pad_token: <|endoftext|>}"},
    **{"datasets": "[{path: data/pairs.json, type: completion, field: instruction, ds_type: json}]"},
    **{"sequence_len": 64, "val_set_size": 0, "lr_scheduler": "linear", "optimizer": "adamw_torch"},
    **dict.fromkeys(("sample_packing", "flash_attention", "bf16", "fp16", "tf32"), False),
}
_ALL = {"outputs": "all"}
STACKS = {
    "llama-factory": Stack(
        "llamafactory",
        "llamafactory-cli",
        {
            "full SFT": Training(_FACTORY),
            "LoRA SFT": Training({**_FACTORY, "finetuning_type": "lora"}),
            "DPO": Training({**_FACTORY, "stage": "dpo", "dataset": "preferences", "finetuning_type": "lora"}, _ALL),
        },
        _llama_factory,
    ),
    # It reads logits for the accuracy of training batches.
    "ms-swift": Stack(
        "ms-swift",
        "swift",
        {
            "full SFT": Training(_SWIFT, _ALL),
            "LoRA SFT": Training({**_SWIFT, "tuner_type": "lora", "lora_dropout": 0.0}, _ALL),
        },
        _swift,
    ),
    "sentence-transformers": Stack(
        "sentence-transformers",
        "python",
        {"pairs": Training({"model_name_or_path": MASKED, "data": "data/pairs.json"}, _ALL)},
        _sentence_transformers,
    ),
    # The model inside is found, and split; the head is code around it.
    "lightning": Stack(
        "lightning",
        "python",
        {"own head": Training({"model_name_or_path": LLAMA, "data": "data/pairs.json"}, goes_on=False)},
        _lightning,
    ),
    # Below stage 3 it places models on a device of CUDA if there are several ranks.
    "axolotl": Stack("axolotl", "axolotl", {"full SFT": Training(_AXOLOTL, stock=3)}, _axolotl),
}
