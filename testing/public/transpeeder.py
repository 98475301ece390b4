"""Runs transpeeder's train.py by DeepSpeed's launcher: a Llama in a pipeline, from the layer files that its own script
converts a model of transformers to.

transpeeder needs an older transformers, such as 4.33, loguru and scikit-learn: run testing.public in an environment
that has them. ``torch.cuda`` and gloo stand for GPUs, and testing/stand_ins/kernels for flash-attn.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from ds_lgamp.config import BLOCK
from testing.in_host import CUDA
from testing.launching import ON_CPU, ROOT, free_port, run
from testing.public.deepspeed_scripts import AT_START, numbers_of
from testing.public.outcome import Case, compared, without_block

RANKS, STEPS, MIDDLE, BATCH = 2, 6, 3, 8
LAYERS = 10
"""Fewer would give the last two files of the conversion names that DeepSpeed does not look for."""
SPECIAL = ("<unk>", "<s>", "</s>")
MODEL, CONVERTED = "llama", "converted"
BLOCKS = {"chunks_per_rank": 2, "placement": "modular"}


def cases(tree: Path, folder: Path) -> Iterable[Case]:
    """Returns the cases on two pipeline ranks. The losses of all steps are compared."""
    variables = {"PYTHONPATH": f"{AT_START}:{tree / 'src'}:{ROOT / 'testing' / 'stand_ins' / 'kernels'}", CUDA: "1"}
    material = cache(partial(_material, tree, folder, variables))

    def train(output: str, steps: int, block: Mapping[str, Any] | None, *words: str) -> list[float]:
        material()
        config = {
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "eps": 1e-4, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
            **({} if block is None else {BLOCK: block}),
        }
        launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(RANKS)]
        script = [f"--master_port={free_port()}", str(tree / "examples" / "train.py"), *words]
        own = {"init_ckpt": CONVERTED, "data_path": "prompts.json", "output_dir": output, "train_steps": steps}
        sizes = {"pipe_parallel_size": RANKS, "max_seq_len": 32, "save_steps": MIDDLE}
        flags = [f"--{name}={value}" for name, value in {**own, **sizes}.items()]
        return numbers_of(
            lambda path: [*launcher, *script, *flags, f"--deepspeed_config={path}"], config, folder, variables
        )

    stock = cache(lambda: without_block(partial(train, "stock", STEPS, None)))

    def compare() -> str:
        alone = stock()
        return compared(train("trained", STEPS, BLOCKS), alone)

    def compare_resumed() -> str:
        alone = stock()
        train("half", MIDDLE, BLOCKS)
        words = [f"--resume_step={MIDDLE}", "--resume_ckpt=half"]
        return compared(train("resumed", STEPS, {"chunks_per_rank": 1}, *words), alone[MIDDLE:])

    yield Case(f"P{RANKS}, ZeRO-1, converted layer files", compare)
    yield Case(f"P{RANKS}, ZeRO-1, resumed with other chunks", compare_resumed)


def _material(tree: Path, folder: Path, variables: Mapping[str, str]) -> None:
    """Writes prompts and a small model, and converts that to layer files."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    lines = [line for page in sorted((ROOT / "docs").glob("*.md")) for line in page.read_text().splitlines()]
    lines = [line for line in lines if len(line) > 80][: STEPS * BATCH]
    rows = [json.dumps({"prompt": line[:40], "output": line[40:]}) for line in lines]
    (folder / "prompts.json").write_text("\n".join(rows))
    vocabulary = ByteLevelBPETokenizer()
    vocabulary.train_from_iterator(lines, vocab_size=512, special_tokens=list(SPECIAL))
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary.get_vocab_size(), **shape)).save_pretrained(folder / MODEL)
    vocabulary.save_model(str(folder / MODEL))
    named = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL))
    (folder / MODEL / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", **named}))
    convert = [sys.executable, str(tree / "scripts" / "convert2ckpt.py"), "--model_name_or_path", MODEL]
    run([*convert, "--output_dir", CONVERTED, "--mp_world_size", "1"], 300, {**ON_CPU, **variables}, folder)
