"""Runs Megatron-DeepSpeed's pretrain_gpt.py: a tiny GPT in a pipeline, on random tokens."""

import random
import struct
from array import array
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

from testing.public.deepspeed_scripts import losses_of
from testing.public.outcome import Case, compared, without_block

VOCABULARY, DOCUMENTS, TOKENS = 1023, 64, 256
RANKS, STEPS = 4, 6
MODEL = f"""
    --num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size {VOCABULARY}
    --split 100,0,0 --data-impl mmap --num-workers 0 --train-iters {STEPS} --eval-iters 0 --eval-interval 1000
    --lr 1e-3 --lr-decay-style constant --clip-grad 1.0 --adam-eps 1e-4 --log-interval 1
    --micro-batch-size 1 --global-batch-size 8 --pipeline-model-parallel-size 2
    --distributed-backend gloo --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
    --no-gradient-accumulation-fusion --deepspeed
"""
LLAMA = "--swiglu --normalization rmsnorm --disable-bias-linear"

BLOCK = {"layers_per_chunk": 2, "placement": "modular"}


def cases(tree: Path, folder: Path) -> Iterable[Case]:
    """Returns the cases at ZeRO stages 1 and 3. Stage 3 uses the script's own ``deepspeed.zero.Init``. Stock trains at
    stage 1."""
    text = folder / "text"
    write_text(text)

    def train(flags: str, stage: int, block: dict[str, Any]) -> list[float]:
        config = {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage},
            **block,
        }
        words = [*MODEL.split(), *flags.split(), "--zero-stage", str(stage), "--data-path", str(text)]
        return losses_of(tree / "pretrain_gpt.py", RANKS, words, config)

    def compare(flags: str, stage: int) -> str:
        alone = without_block(partial(stock, flags))
        return compared(train(flags, stage, {"ds_lgamp": BLOCK}), alone)

    stock = cache(lambda flags: train(flags, 1, {}))
    for name, flags in (("learned positions", ""), ("SwiGLU, RMSNorm", LLAMA)):
        for stage in (1, 3):
            yield Case(f"P2 x W2, ZeRO-{stage}, {name}", partial(compare, flags, stage))


def write_text(path: Path, vocabulary: int = VOCABULARY) -> None:
    """Writes documents of random tokens of ``vocabulary`` to the files that Megatron's ``--data-impl mmap`` reads."""
    numbers = random.Random(0)
    tokens = array("H", (numbers.randrange(vocabulary) for _ in range(DOCUMENTS * TOKENS)))
    path.with_suffix(".bin").write_bytes(tokens.tobytes())
    sizes = array("i", [TOKENS] * DOCUMENTS)
    offsets = array("q", range(0, DOCUMENTS * TOKENS * tokens.itemsize, TOKENS * tokens.itemsize))
    documents = array("q", range(DOCUMENTS + 1))
    unsigned_16_bits = 8
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, unsigned_16_bits, DOCUMENTS, DOCUMENTS + 1)
    content = b"".join(part.tobytes() for part in (sizes, offsets, documents))
    path.with_suffix(".idx").write_bytes(header + content)
