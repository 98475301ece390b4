"""Runs sft.py, dpo.py, kto.py and reward.py of trl, whose trainers compute losses of what the model returns. Of models
with experts they log the loss of balance, too.

The model, its vocabulary and the data are small and made here, of this project's documentation. The scripts need the
packages trl and datasets.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from importlib.metadata import distributions
from itertools import product
from pathlib import Path
from typing import Any

from testing.public.outcome import Case, commit_of, compared, without_block
from testing.public.transformers_scripts import (
    CAUSAL,
    LENGTH,
    RANKS,
    STEPS,
    STOCK_STAGE,
    byte_pairs,
    launch,
    make_material,
    save,
    write_config,
)

ROWS, WORDS = 64, 6
"""Of the data, and of each of its texts."""
TRAINED = (
    f"--use_cpu --bf16 False --report_to none --per_device_train_batch_size 2 --gradient_accumulation_steps 4 "
    f"--max_steps {STEPS} --logging_steps 1 --learning_rate 1e-3 --adam_epsilon 1e-4 --max_length 48 "
    f"--save_strategy steps --save_steps {STEPS}"
).split()
"""With a large epsilon, so that Adam does not spread the rounding of gradients near 0: it would flip a tie of two
experts."""
WHOLE = {"outputs": "all"}
SPLIT = {"pipeline_ranks": 2, "chunks_per_rank": 2, "outputs": "all"}
STAGES = range(4)
LAYOUTS: dict[str, tuple[int, Mapping[str, Any]]] = {
    "W1": (1, WHOLE),
    "W2": (2, WHOLE),
    "W4": (4, WHOLE),
    "P2": (2, SPLIT),
    "P2, W2": (4, SPLIT),
    "P2, W4": (8, SPLIT),
}
"""In which models with experts train: by pipeline and data-parallel ranks, how many there are of all, and the block."""
_SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
_SIZES |= {"max_position_embeddings": LENGTH, "num_experts_per_tok": 2}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
_GROUPED = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("mixtral", {"intermediate_size": 64, "num_local_experts": 4, "router_aux_loss_coef": 0.02}),
    "Qwen3-MoE": ("qwen3_moe", {"moe_intermediate_size": 32, "num_experts": 8, "head_dim": 16}),
    "GPT-OSS": ("gpt_oss", {"intermediate_size": 64, "num_local_experts": 4, "head_dim": 16}),
    "DeepSeek-V3": ("deepseek_v3", {"intermediate_size": 128, "moe_intermediate_size": 32, **_LATENT, **_GROUPED}),
}
"""By name: the type of a model, and its sizes. The last one balances its experts without a loss."""


def _texts(parts: list[str]) -> dict[str, Any]:
    return {"text": " ".join(parts)}


def _preferences(parts: list[str]) -> dict[str, Any]:
    prompt, chosen, rejected = parts
    return {"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {rejected}"}


def _judged(parts: list[str]) -> dict[str, Any]:
    prompt, completion, other = parts
    return {"prompt": prompt, "completion": f" {completion}", "label": len(completion) > len(other)}


ROWS_OF: dict[str, Callable[[list[str]], dict[str, Any]]] = {
    "sft": _texts,
    "dpo": _preferences,
    "kto": _judged,
    "reward": _preferences,
}


def cases(tree: Path, folder: Path) -> Iterable[Case]:
    """Returns the cases: on two ranks, and with experts in :data:`LAYOUTS`. Stock trains on as many ranks, at stage 2.
    The losses of all steps are compared."""
    sizes = {name: "auto" for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")}
    material = cache(partial(make_material, folder, {name: partial(_make, *of) for name, of in EXPERTS.items()}))

    def train(script: str, model: str, stage: int, block: Mapping[str, Any], ranks: int) -> list[float]:
        text, models = material()
        output = folder / "trained" / str(len(list(folder.glob("trained/*"))))
        config = {**sizes, "zero_optimization": {"stage": stage}, **block}
        data = ["--model_name_or_path", str(models[model]), "--dataset_name", str(_written(text, folder, script))]
        named = ["--deepspeed", str(write_config(folder, config)), "--output_dir", str(output)]
        launch(config, [str(tree / "trl" / "scripts" / f"{script}.py"), *data, *TRAINED, *named], folder, ranks=ranks)
        history = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
        return [entry[name] for entry in history for name in ("loss", "aux_loss") if name in entry]

    stock = cache(lambda script, model, ranks: without_block(lambda: train(script, model, STOCK_STAGE, {}, ranks)))

    def compare(script: str, model: str, stage: int, block: Mapping[str, Any], ranks: int = RANKS) -> str:
        alone = stock(script, model, ranks)
        return compared(train(script, model, stage, {"ds_lgamp": block}, ranks), alone)

    for script in ROWS_OF:
        yield Case(f"{script}.py, P2, ZeRO-2", partial(compare, script, CAUSAL, 2, SPLIT))
    for script in ("sft", "dpo"):
        yield Case(f"{script}.py, W{RANKS}, ZeRO-3", partial(compare, script, CAUSAL, 3, WHOLE))
    for model, (layout, (ranks, block)), stage in product(EXPERTS, LAYOUTS.items(), STAGES):
        yield Case(f"sft.py, {model}, {layout}, ZeRO-{stage}", partial(compare, "sft", model, stage, block, ranks))


def version_of(tree: Path) -> str:
    """Returns the commit of a tree of trl, or the version that pip has installed there."""
    installed = next(distributions(name="trl", path=[str(tree)]), None)
    return commit_of(tree) if installed is None else installed.version


def _make(kind: str, sizes: Mapping[str, Any], text: Path, folder: Path) -> Path:
    """Makes a small model of a ``kind`` of transformers, and its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    vocabulary, ends = byte_pairs(text), {"bos_token_id": 0, "eos_token_id": 0}
    config = AutoConfig.for_model(kind, vocab_size=vocabulary.get_vocab_size(), **_SIZES, **sizes, **ends)
    return save(AutoModelForCausalLM.from_config, config, vocabulary, {"eos_token": "<|endoftext|>"}, folder)


def _written(text: Path, folder: Path, script: str) -> Path:
    """Writes the data of a script, and returns their folder."""
    path = folder / "data" / script
    path.mkdir(parents=True, exist_ok=True)
    words = text.read_text().split()
    parts = [" ".join(words[start : start + WORDS]) for start in range(0, 3 * ROWS * WORDS, WORDS)]
    rows = [ROWS_OF[script](parts[start : start + 3]) for start in range(0, 3 * ROWS, 3)]
    (path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path
