"""Megatron-LM's unedited pretrain_bert.py, pretrain_t5.py and pretrain_mamba.py on the CPU."""

import os
from functools import cache

import pytest
import torch

from testing import ROOT
from testing.pretraining import (
    DISTRIBUTED_OPTIMIZER,
    LAYERS,
    MICRO_BATCHES,
    PIPELINE,
    assert_close,
    block_flag,
    has_flag,
    megatron_tree,
    pretrain,
)
from testing.pretraining import MODEL as MOCK
from testing.ranks import run_on_ranks
from tests.integrations.megatron.training_loop import prepare_process

WORDS, DOCUMENTS, SENTENCES, LENGTH = 200, 64, 8, 12
MODEL = f"""
    --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 32
    --attention-dropout 0 --hidden-dropout 0 --split 90,5,5 --num-workers 0 --micro-batch-size 2
    --global-batch-size {2 * MICRO_BATCHES} --legacy-tokenizer --tokenizer-type BertWordPieceLowerCase
"""
SCRIPTS = {
    "pretrain_bert.py": f"{MODEL} --num-layers {LAYERS} --seq-length 32 --spec local",
    "pretrain_t5.py": f"{MODEL} --encoder-num-layers {LAYERS} --decoder-num-layers {LAYERS} --encoder-seq-length 32 "
    "--decoder-seq-length 16 --vocab-extra-ids 20",
    "pretrain_mamba.py": f"{MOCK} --spec testing.mamba_layers stack --hybrid-override-pattern M-M*M-M- "
    "--mamba-num-groups 2 --mamba-head-dim 32 --mamba-state-dim 8",
}
RUNS = {
    "BERT, P1": ("pretrain_bert.py", 1, 0, "", 4),
    "BERT, P2": ("pretrain_bert.py", 2, 0, PIPELINE, 2),
    "BERT, P1 x W2 at stage 1": ("pretrain_bert.py", 2, 1, DISTRIBUTED_OPTIMIZER, 4),
    "BERT, P1 x W2 at stage 2": ("pretrain_bert.py", 2, 2, "", 4),
    "BERT, P2 x W2 at stage 3": ("pretrain_bert.py", 4, 3, PIPELINE, 2),
    "T5": ("pretrain_t5.py", 1, 0, "", 1),
    "T5, W2 at stage 1": ("pretrain_t5.py", 2, 1, DISTRIBUTED_OPTIMIZER, 1),
    "T5, W2 at stage 3": ("pretrain_t5.py", 2, 3, "", 1),
    "Mamba, P2": ("pretrain_mamba.py", 2, 0, PIPELINE, 1),
    "Mamba, W2 at stage 1": ("pretrain_mamba.py", 2, 1, DISTRIBUTED_OPTIMIZER, 1),
    "Mamba, P2 x W2 at stage 3": ("pretrain_mamba.py", 4, 3, PIPELINE, 1),
    "Mamba, P1 x N2": ("pretrain_mamba.py", 1, 0, "", 2),
    "Mamba, P2 x N2": ("pretrain_mamba.py", 2, 0, PIPELINE, 2),
}
"""Script, ranks, stage, flags, and chunks per rank."""
CUTS_MAMBA = "--hybrid-layer-pattern"
"""A flag of the releases whose MambaModel has chunks, from 0.17 on."""


@pytest.fixture(scope="module", autouse=True)
def layers_of_mamba():
    """Lets the tree import ``testing.mamba_layers``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Returns flags for a corpus of random sentences and its vocabulary."""
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
    """Returns a function from a script to the flags that start a run from the same weights, and to the losses without
    a block."""

    @cache
    def train(script):
        folder = tmp_path_factory.mktemp("start")
        flags = data_of(script, corpus)
        pretrain(1, f"{flags} --save {folder} --save-interval 1 --exit-interval 1", **of(script))
        start = f"{flags} --load {folder} --finetune"
        return start, pretrain(1, start, **of(script))

    return train


def data_of(script, corpus):
    return "" if script == "pretrain_mamba.py" else corpus


def of(script):
    if script != "pretrain_mamba.py" and not has_flag("--legacy-tokenizer"):
        pytest.skip("from release 0.17 on, stock BERT draws other words in every process, and T5 has no special tokens")
    return {"script": script, "model": SCRIPTS[script]}


@pytest.mark.parametrize("name", RUNS)
def test_other_models_train_with_a_block_as_without(stock, name, tmp_path):
    script, ranks, stage, flags, chunks = RUNS[name]
    if script == "pretrain_mamba.py" and chunks > 1 and not has_flag(CUTS_MAMBA):
        pytest.skip("the MambaModel of the tree's release has no chunks")
    start, losses = stock(script)
    block = block_flag(flags, tmp_path, stage, chunks_per_rank=chunks)
    ours = pretrain(ranks, f"{start} {flags} {block}", "-m ds_lgamp run", **of(script))
    assert_close(ours, losses)


@pytest.mark.parametrize(
    ("script", "ranks", "flags", "words"),
    [
        ("pretrain_t5.py", 1, "", "takes no vp_stage, .*; set ds_lgamp.chunks_per_rank to 1"),
        ("pretrain_mamba.py", 1, "", "MambaModel takes no vp_stage, .*; set ds_lgamp.chunks_per_rank to 1"),
        ("pretrain_mamba.py", 2, PIPELINE, "MambaModel takes no vp_stage, .*; set ds_lgamp.chunks_per_rank to 1"),
    ],
)
def test_models_without_chunks_are_refused_with_a_way_out(corpus, script, ranks, flags, words, tmp_path):
    if script == "pretrain_mamba.py" and has_flag(CUTS_MAMBA):
        pytest.skip("the MambaModel of the tree's release has chunks")
    model, block = of(script), block_flag("", tmp_path, chunks_per_rank=2)
    with pytest.raises(AssertionError, match=f"ds_lgamp: .*{words}"):
        pretrain(ranks, f"{data_of(script, corpus)} {flags} {block}", "-m ds_lgamp run", **model)
