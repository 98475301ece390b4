"""Runs OpenRLHF's SFT trainer, an installed package, in bf16 and with the block in DS_LGAMP_BLOCK, because the trainer
makes its configuration in Python.

``torch.cuda`` stands for the CPU, and testing/stand_ins/openrlhf for flash-attn. One pipeline rank is compared: when it
saves, the trainer reads the state of the model on the first rank alone, for which several pipeline ranks would wait.
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
    --model.model_name_or_path llama --data.dataset data/pairs.json --data.max_len 64 --data.input_key instruction
    --data.output_key chosen --ds.attn_implementation eager --ds.grad_accum_dtype fp32 --ds.zero_stage 2
    --train.micro_batch_size 2 --train.batch_size 16 --train.max_epochs 2 --adam.lr 1e-3
"""


def cases(environment: Path, folder: Path) -> Iterable[Case]:
    """Returns the case on two ranks. The losses of all batches and the norms of all gradients are compared."""
    material = cache(partial(stacks.write_material, folder))

    def train(block: Mapping[str, Any] | None) -> list[float]:
        material()
        paths = f"{AT_START}:{ROOT / 'testing' / 'stand_ins' / 'openrlhf'}"
        variables = {**stacks.variables(environment, folder), "PYTHONPATH": paths, CUDA: "1"}
        if block is not None:
            variables["DS_LGAMP_BLOCK"] = str(folder / "ds_config.json")
        words = [*stacks.torchrun(environment / "bin" / "python"), "-m", "openrlhf.cli.train_sft", *FLAGS.split()]
        return numbers_of(lambda _: words, {} if block is None else {"ds_lgamp": block}, folder, variables)

    def compare() -> str:
        alone = without_block(partial(train, None))
        return compared(train({"outputs": "all"}), alone, TOLERANCE)

    yield Case(f"SFT, W{RANKS}, ZeRO-2, bf16", compare)
