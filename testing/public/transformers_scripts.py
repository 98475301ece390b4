"""Runs run_clm.py and run_mlm.py of transformers, which train with the Trainer, and Accelerate's example for DeepSpeed,
which has a loop of its own.

The models and their vocabulary are small and made here; the text is this project's documentation. The scripts need the
packages datasets, evaluate and scikit-learn.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from testing.launching import ON_CPU, ROOT, recorded, torchrun
from testing.public.outcome import Case, compared, without_block

RANKS, STEPS, LENGTH = 2, 8, 64
STOCK_STAGE = 2
CAUSAL, MASKED = "run_clm.py", "run_mlm.py"
CHUNKS = {"pipeline_ranks": 2, "chunks_per_rank": 2}
TRAINED = (
    f"--do_train --use_cpu --report_to none --per_device_train_batch_size 2 --gradient_accumulation_steps 4 "
    f"--max_steps {STEPS} --logging_steps 1 --learning_rate 1e-3"
).split()
MakeModel = Callable[[Path, Path], Path]
"""Makes a model and its tokenizer by a text, in a folder, which it returns."""
OWN_LOOP = (
    f"--validation_split_percentage 2 --per_device_train_batch_size 2 --per_device_eval_batch_size 2 "
    f"--gradient_accumulation_steps 4 --max_train_steps {4 * STEPS} --learning_rate 1e-3 --seed 1 --block_size {LENGTH}"
).split()


def trainer_cases(tree: Path, folder: Path) -> Iterable[Case]:
    """Returns the cases of the Trainer's scripts on two ranks. Stock trains at stage 2. The losses of all steps are
    compared."""
    scripts = tree / "examples" / "pytorch" / "language-modeling"
    sizes = {name: "auto" for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")}
    material = cache(partial(make_material, folder))

    def train(script: str, stage: int, block: Mapping[str, Any], *words: str) -> list[float]:
        text, models = material()
        length = ["--block_size" if script == CAUSAL else "--max_seq_length", str(LENGTH)]
        output = folder / "trained" / str(len(list(folder.glob("trained/*"))))
        config = {**sizes, "zero_optimization": {"stage": stage}, **block}
        named = ["--deepspeed", str(write_config(folder, config)), "--output_dir", str(output)]
        data = ["--model_name_or_path", str(models[script]), "--train_file", str(text)]
        launch(config, [str(scripts / script), *data, *length, *TRAINED, *named, *words], folder)
        history = json.loads((output / "trainer_state.json").read_text())["log_history"]
        return [entry["loss"] for entry in history if "loss" in entry]

    stock = cache(lambda script: without_block(lambda: train(script, STOCK_STAGE, {}, "--save_strategy", "no")))

    def compare(script: str, stage: int, block: Mapping[str, Any]) -> str:
        alone = stock(script)
        return compared(train(script, stage, {"ds_lgamp": block}, "--save_strategy", "no"), alone)

    def compare_resumed() -> str:
        alone, block = stock(CAUSAL), {"ds_lgamp": CHUNKS}
        saved = folder / "trained" / str(len(list(folder.glob("trained/*"))))
        train(CAUSAL, 3, block, "--save_strategy", "steps", "--save_steps", str(STEPS // 2))
        resume = ["--save_strategy", "no", "--resume_from_checkpoint", str(saved / f"checkpoint-{STEPS // 2}")]
        return compared(train(CAUSAL, 3, {"ds_lgamp": {"pipeline_ranks": 1}}, *resume), alone)

    for script in (CAUSAL, MASKED):
        for stage in (2, 3):
            yield Case(f"{script}, P2, ZeRO-{stage}", partial(compare, script, stage, CHUNKS))
    yield Case(f"{CAUSAL}, W2, ZeRO-3", partial(compare, CAUSAL, 3, {"pipeline_ranks": 1}))
    yield Case(f"{CAUSAL}, P2, ZeRO-3, resumed as W2", compare_resumed)


def loop_cases(tree: Path, folder: Path) -> Iterable[Case]:
    """Returns the cases of Accelerate's loop on two ranks. The loss on the held-out text is compared."""
    script = tree / "examples" / "by_feature" / "deepspeed_with_config_support.py"
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    material = cache(partial(make_material, folder))

    def train(stage: int, block: Mapping[str, Any]) -> list[float]:
        text, models = material()
        config = {**sizes, "zero_optimization": {"stage": stage}, **block}
        variables = {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(write_config(folder, config)),
        }
        output = folder / "trained"
        words = ["--model_name_or_path", str(models[CAUSAL]), "--train_file", str(text), "--output_dir", str(output)]
        launch(config, [str(script), *words, *OWN_LOOP], folder, variables, ["-m", "testing.accelerate_cpu"])
        return [json.loads((output / "all_results.json").read_text())["eval_loss"]]

    stock = cache(lambda: without_block(lambda: train(STOCK_STAGE, {})))

    def compare(stage: int) -> str:
        alone = stock()
        return compared(train(stage, {"ds_lgamp": CHUNKS}), alone)

    for stage in (2, 3):
        yield Case(f"P2, ZeRO-{stage}", partial(compare, stage))


def write_config(folder: Path, config: Mapping[str, Any]) -> Path:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    return path


def launch(
    config: Mapping[str, Any],
    words: Sequence[str],
    folder: Path,
    variables: Mapping[str, str] = {},
    under: Sequence[str] = (),
    ranks: int = RANKS,
) -> None:
    """Runs a script on ``ranks``, with ``ds_lgamp run`` if ``config`` has a block. ``folder`` takes what it caches.

    Args:
        config: the configuration.
        words: the script and its arguments.
        folder: takes what the script caches, and the record of its steps, which proves that the block counted.
        variables: more of the environment.
        under: words ahead of the launcher.
        ranks: how many.
    """
    record = folder / "recorded" / str(len(list(folder.glob("recorded/*"))))
    traced = ["-m", "ds_lgamp", "run", "--trace", str(record), "--trace-steps", f"1:{STEPS}"]
    environment = {**ON_CPU, "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    has_block = "ds_lgamp" in config
    torchrun(ranks, [*under, *(traced if has_block else []), *words], environment={**environment, **variables})
    assert not has_block or recorded(record), "the script trained, but not with the block"


def make_material(folder: Path, more: Mapping[str, MakeModel] = {}) -> tuple[Path, dict[str, Path]]:
    """Writes a text and, for each of the Trainer's scripts and whatever ``more`` has, a model with its tokenizer.
    Returns their paths."""
    text = folder / "text.txt"
    text.write_text("\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))))
    makers = {CAUSAL: _causal, MASKED: _masked, **more}
    return text, {name: make(text, folder / name) for name, make in makers.items()}


def byte_pairs(text: Path) -> Any:
    """Returns a vocabulary of byte pairs of a text."""
    from tokenizers import ByteLevelBPETokenizer

    vocabulary = ByteLevelBPETokenizer()
    vocabulary.train([str(text)], vocab_size=1024, special_tokens=["<|endoftext|>"])
    return vocabulary


def _causal(text: Path, folder: Path) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    vocabulary = byte_pairs(text)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    shape = {"n_positions": LENGTH, "n_embd": 64, "n_layer": 4, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=vocabulary.get_vocab_size(), **shape, **dropout)
    return save(GPT2LMHeadModel, config, vocabulary, {"eos_token": "<|endoftext|>"}, folder)


def _masked(text: Path, folder: Path) -> Path:
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertForMaskedLM

    vocabulary = BertWordPieceTokenizer()
    vocabulary.train([str(text)], vocab_size=1024)
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
    config = BertConfig(
        vocab_size=vocabulary.get_vocab_size(),
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return save(BertForMaskedLM, config, vocabulary, special, folder)


def save(model: Callable[[Any], Any], config: Any, vocabulary: Any, special: dict[str, str], folder: Path) -> Path:
    """Saves a new model with its tokenizer, and returns the folder."""
    import torch
    from transformers import PreTrainedTokenizerFast

    folder.mkdir()
    vocabulary.save(str(folder / "vocabulary.json"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "vocabulary.json"), model_max_length=LENGTH, **special
    )
    torch.manual_seed(0)
    model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
