"""Megatron-LM's unedited pretrain_bert.py and pretrain_t5.py on the CPU, on a corpus of random sentences."""

import pytest
import torch

from testing.pretraining import LAYERS, MICRO_BATCHES, block_flag, megatron_tree, pretrain
from testing.ranks import run_on_ranks
from tests.integrations.megatron.training_loop import prepare_process

WORDS, DOCUMENTS, SENTENCES, LENGTH = 200, 64, 8, 12
MODEL = f"""
    --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 32
    --attention-dropout 0 --hidden-dropout 0 --split 90,5,5 --num-workers 0 --micro-batch-size 2
    --global-batch-size {2 * MICRO_BATCHES} --legacy-tokenizer --tokenizer-type BertWordPieceLowerCase
"""
SCRIPTS = {
    "pretrain_bert.py": f"--num-layers {LAYERS} --seq-length 32 --spec local",
    "pretrain_t5.py": f"--encoder-num-layers {LAYERS} --decoder-num-layers {LAYERS} --encoder-seq-length 32 "
    "--decoder-seq-length 16 --vocab-extra-ids 20",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Returns flags for a corpus and its vocabulary."""
    megatron_tree()
    folder = tmp_path_factory.mktemp("corpus")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(WORDS))]
    (folder / "vocabulary.txt").write_text("\n".join(words))
    run_on_ranks(1, write_corpus, str(folder / "corpus"), before_init=prepare_process)
    return f"--data-path {folder}/corpus --vocab-file {folder}/vocabulary.txt --data-cache-path {folder}/cache"


def write_corpus(prefix):
    import numpy
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
    generator = torch.Generator().manual_seed(1)
    for _ in range(DOCUMENTS):
        for _ in range(SENTENCES):
            builder.add_item(torch.randint(5, 5 + WORDS, (LENGTH,), generator=generator))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


@pytest.fixture(scope="module")
def stock(corpus, tmp_path_factory):
    """Returns by script the flags that start a run from the same weights, and the losses without a block."""
    found = {}
    for script, flags in SCRIPTS.items():
        folder = tmp_path_factory.mktemp("start")
        pretrain(
            1,
            f"{flags} {corpus} --save {folder} --save-interval 1 --exit-interval 1",
            **{"script": script, "model": MODEL},
        )
        start = f"{flags} {corpus} --load {folder} --finetune"
        found[script] = start, pretrain(1, start, script=script, model=MODEL)
    return found


@pytest.mark.parametrize(
    ("script", "ranks", "flags", "chunks"),
    [
        ("pretrain_bert.py", 1, "", 4),
        ("pretrain_bert.py", 2, "--pipeline-model-parallel-size 2", 2),
        ("pretrain_t5.py", 1, "", 1),
    ],
)
def test_other_models_train_with_a_block_as_without(stock, script, ranks, flags, chunks, tmp_path):
    start, losses = stock[script]
    block = block_flag(flags, tmp_path, chunks_per_rank=chunks)
    ours = pretrain(ranks, f"{start} {flags} {block}", "-m ds_lgamp run", script=script, model=MODEL)
    assert ours.training == pytest.approx(losses.training, rel=1e-6)
    assert ours.validation == pytest.approx(losses.validation, rel=1e-6)


def test_t5_in_chunks_is_refused_with_a_way_out(corpus, tmp_path):
    script = "pretrain_t5.py"
    with pytest.raises(AssertionError, match="ds_lgamp: .* takes no vp_stage, .*; set ds_lgamp.chunks_per_rank to 1"):
        flags = f"{SCRIPTS[script]} {corpus} {block_flag('', tmp_path, chunks_per_rank=2)}"
        pretrain(1, flags, "-m ds_lgamp run", script=script, model=MODEL)
