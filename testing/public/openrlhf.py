"""Runs OpenRLHF's SFT and DPO trainers, an installed package, in bf16 and with the block in DS_LGAMP_BLOCK, because the
trainers make their configuration in Python.

``torch.cuda`` stands for the CPU, and testing/stand_ins/kernels for flash-attn.
"""

from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from testing.in_host import CUDA
from testing.launching import ROOT
from testing.public import stacks
from testing.public.deepspeed_scripts import AT_START, numbers_of
from testing.public.outcome import Case, compared, without_block
from testing.public.transformers_scripts import RANKS

TOLERANCE = 1e-3
"""Of bf16: stock rounds weights and sums of gradients at other places."""
FLAGS = """
    --model.model_name_or_path llama --data.dataset data/pairs.json --data.max_len 64
    --ds.attn_implementation eager --ds.grad_accum_dtype fp32 --ds.zero_stage 2
    --train.micro_batch_size 2 --train.batch_size 16 --train.max_epochs 2 --adam.lr 1e-3
"""
TRAINERS = {
    "SFT": "openrlhf.cli.train_sft --data.input_key instruction --data.output_key chosen",
    "DPO": "openrlhf.cli.train_dpo --ref.model_name_or_path llama --data.prompt_key instruction",
}


def cases(environment: Path, folder: Path) -> Iterable[Case]:
    """Returns the cases on two ranks. The losses of all batches and the norms of all gradients are compared."""
    material = cache(partial(stacks.write_material, folder))

    def train(trainer: str, block: Mapping[str, Any] | None) -> list[float]:
        material()
        variables = {
            **stacks.variables(environment, folder),
            "PYTHONPATH": f"{AT_START}:{ROOT / 'testing' / 'stand_ins' / 'kernels'}",
            CUDA: "1",
            # Stock compiles its optimizer, and would wait for ever where an ended process has left a lock.
            "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        }
        if block is not None:
            variables["DS_LGAMP_BLOCK"] = str(folder / "ds_config.json")
        words = [*stacks.torchrun(environment / "bin" / "python"), "-m", *TRAINERS[trainer].split(), *FLAGS.split()]
        return numbers_of(lambda _: words, {} if block is None else {"ds_lgamp": block}, folder, variables)

    stock = cache(lambda trainer: without_block(partial(train, trainer, None)))

    def compare(trainer: str, block: Mapping[str, Any]) -> str:
        alone = stock(trainer)
        return compared(train(trainer, {"outputs": "all", **block}), alone, TOLERANCE)

    for trainer in TRAINERS:
        yield Case(f"{trainer}, P2, ZeRO-2, bf16", partial(compare, trainer, stacks.SPLIT))
        yield Case(f"{trainer}, W{RANKS}, ZeRO-2, bf16", partial(compare, trainer, {}))
