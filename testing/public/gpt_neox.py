"""Runs GPT-NeoX's train.py by its own launcher, deepy.py, with the block in the YAML that the launcher takes.

``torch.cuda`` stands for the CPU, and a function of this project for the index that GPT-NeoX would compile.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from ds_lgamp.config import BLOCK
from testing.in_host import CUDA
from testing.launching import free_port
from testing.public.deepspeed_scripts import AT_START, numbers_of
from testing.public.megatron_deepspeed import write_text
from testing.public.outcome import Case, compared, without_block

RANKS, STEPS, MIDDLE = 2, 6, 3
BATCH, VOCABULARY = 8, 500
SPLIT = {"chunks_per_rank": 2, "placement": "modular"}
TRAINED = {
    "num_gpus": RANKS,
    "global_num_gpus": RANKS,
    "distributed_backend": "gloo",
    "data_impl": "mmap",
    "split": "100,0,0",
    "num_workers": 0,
    "tokenizer_type": "CharLevelTokenizer",
    "num_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "pos_emb": "rotary",
    "no_weight_tying": True,
    "attention_dropout": 0,
    "hidden_dropout": 0,
    "precision": "fp32",
    "optimizer": {"type": "Adam", "params": {"lr": 5e-3, "eps": 1e-4}},
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 1.0,
    "train_micro_batch_size_per_gpu": 1,
    "train_iters": STEPS,
    "lr_decay_iters": STEPS,
    "checkpoint_factor": MIDDLE,
    "eval_interval": 1000,
    "eval_iters": 0,
    "log_interval": 1,
}


def cases(tree: Path, folder: Path) -> Iterable[Case]:
    """Returns the cases on two ranks. The losses of all steps are compared."""
    write_text(folder / "text", VOCABULARY)

    def train(ranks: int, block: Mapping[str, Any] | None, **resumed: Any) -> list[float]:
        own = {"data_path": "text", "save": "saved", "master_port": free_port()}
        ours = {} if block is None else {BLOCK: block}
        sizes = {"pipe_parallel_size": ranks, "gradient_accumulation_steps": BATCH * ranks // RANKS}
        config = {**TRAINED, **own, **sizes, **resumed, **ours}
        variables = {
            "PYTHONPATH": f"{AT_START}:{tree}",
            CUDA: "1",
            # Stock compiles its optimizer, and would wait for ever where an ended process has left a lock.
            "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        }
        return numbers_of(partial(_launch, tree), config, folder, variables)

    # Values at the beginning depend on the number of pipeline ranks.
    stock = cache(lambda ranks: without_block(partial(train, ranks, None)))

    def compare(ranks: int, block: Mapping[str, Any]) -> str:
        alone = stock(ranks)
        return compared(train(ranks, block), alone)

    def compare_resumed() -> str:
        alone = stock(2)
        train(2, SPLIT)
        return compared(train(1, {}, load="saved", iteration=MIDDLE), alone[MIDDLE:])

    yield Case("P2, ZeRO-1, random tokens", partial(compare, 2, SPLIT))
    yield Case(f"W{RANKS}, ZeRO-1", partial(compare, 1, {}))
    yield Case(f"P2, ZeRO-1, resumed as W{RANKS}", compare_resumed)


def _launch(tree: Path, path: Path) -> list[str]:
    """Returns the launch line. Writes what GPT-NeoX takes: settings of its own, and those of DeepSpeed that it does not
    know under a name for such."""
    config = json.loads(path.read_text())
    extra = {BLOCK: config.pop(BLOCK)} if BLOCK in config else {}
    settings = path.with_suffix(".yml")
    settings.write_text(json.dumps({**config, **({"deepspeed_extra_args": extra} if extra else {})}))
    return [sys.executable, str(tree / "deepy.py"), str(tree / "train.py"), str(settings)]
