"""launch/pretrain_bert.py trains as stock DeepSpeed does, through both phases, and goes on anywhere."""

import json
import re
import sys

import pytest
from transformers import AutoModelForMaskedLM, AutoTokenizer

from testing import ROOT
from testing.launching import recorded, run, torchrun

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --max-position-embeddings 64 --dropout 0"
PHASES = "--sequence-lengths 32 64 --steps 4 2 --batch-size 8 4 --micro-batch-size 2 1 --lr 1e-2"
LOG = "--log-interval 1 --eval-interval 2 --eval-iters 1"
LINE = re.compile(r"sequence (\d+) \| step (\d+) \| loss ([\d.]+) \| learning rate ([\d.e+-]+)")
HELD_OUT = re.compile(r"sequence (\d+) \| step (\d+) \| held out: (.*)")

OTHER_MICRO_BATCHES = 5e-3
"""Relative tolerance on another number of ranks. The same samples are in other micro-batches there, and the loss is a
mean over the predicted tokens of a micro-batch."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with prepared text and configurations, with a block and without."""
    folder = tmp_path_factory.mktemp("bert")
    sentences = [f"Section {number}: the quick brown fox jumps over {number % 7} lazy dogs." for number in range(600)]
    for source in range(2):
        own = sentences[source::2]
        (folder / f"{source}.txt").write_text("\n\n".join(" ".join(own[at : at + 5]) for at in range(0, len(own), 5)))
    prepare(folder, folder / "0.txt", folder / "1.txt")
    config = json.loads((ROOT / "example_configs" / "bert.json").read_text())
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-4, "torch_adam": True}}
    del config["bf16"], config["data_types"]
    for name, block in {"stock": {"enabled": False}, "lgamp": {}, "pipeline": {"pipeline_ranks": 2}}.items():
        (folder / f"{name}.json").write_text(json.dumps({**config, "ds_lgamp": block}))
    (folder / "empty.json").write_text("{}")
    return folder


def prepare(folder, *files, flags="--vocab-size 200 --sequence-lengths 32 64 --shards 4"):
    words = ["launch/prepare_data.py", "--bert", *map(str, files), "--output-prefix", str(folder / "data")]
    return run([sys.executable, *words, *flags.split()], 200)


def pretrain(folder, name, ranks, save, flags="", config=None):
    """Runs the script. Returns its output."""
    words = f"{MODEL} {PHASES} {LOG} --data {folder}/data.bert --save {save} {flags}"
    traced = f"--trace {save}-{name}-recorded --trace-steps 1:1"
    script = f"-m ds_lgamp run {traced} launch/pretrain_bert.py --deepspeed_config {config or folder}/{name}.json"
    return torchrun(ranks, [*script.split(), *words.split()])


def losses(printed):
    return {(int(length), int(step)): float(loss) for length, step, loss, _ in LINE.findall(printed)}


@pytest.fixture(scope="module")
def stock(folder):
    return pretrain(folder, "stock", 2, folder / "stock")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("lgamp", 2), ("pipeline", 2), ("lgamp", 4)])
def test_losses_rates_and_accuracies_are_those_of_stock_through_both_phases(folder, stock, name, ranks):
    """Also on twice as many ranks, which see the same batches."""
    printed = pretrain(folder, name, ranks, folder / f"{name}{ranks}")
    assert recorded(folder / f"{name}{ranks}-{name}-recorded")
    assert losses(printed) == pytest.approx(losses(stock), rel=1e-4 if ranks == 2 else OTHER_MICRO_BATCHES)
    rates = [line[3] for line in LINE.findall(printed)]
    assert rates == [line[3] for line in LINE.findall(stock)]
    assert float(rates[3]) == float(rates[5]) == 0 and float(rates[4]) > 0
    if ranks == 2:
        assert [numbers(line) for line in HELD_OUT.findall(printed)] == [
            pytest.approx(numbers(line), abs=2e-3) for line in HELD_OUT.findall(stock)
        ]


def numbers(line):
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", " ".join(line))]


@pytest.mark.slow
def test_the_example_configuration_learns_with_lamb_in_bf16(folder):
    printed = pretrain(folder, "bert", 2, folder / "lamb", "--lr 0.1", config=ROOT / "example_configs")
    first, *_, last = losses(printed).values()
    assert last < first - 0.1


@pytest.mark.slow
def test_a_run_that_ended_inside_a_phase_goes_on_on_another_number_of_ranks(folder, stock):
    begun = losses(pretrain(folder, "lgamp", 1, folder / "resumed", "--exit-interval 3"))
    rest = losses(pretrain(folder, "pipeline", 2, folder / "resumed"))
    assert list(begun) == [(32, 1), (32, 2), (32, 3)] and list(rest) == [(32, 4), (64, 1), (64, 2)]
    assert {**begun, **rest} == pytest.approx(losses(stock), rel=OTHER_MICRO_BATCHES)


@pytest.mark.slow
def test_rows_of_several_pairs_train_as_with_stock_and_go_on_on_another_number_of_ranks(folder):
    """Pairs of 32 tokens fill rows of 32 tokens, then of 64."""
    stock = pretrain(folder, "stock", 2, folder / "packed-stock", "--pack 32")
    pipeline = pretrain(folder, "pipeline", 2, folder / "packed-pipeline", "--pack 32")
    assert losses(pipeline) == pytest.approx(losses(stock), rel=1e-4)
    assert [numbers(line) for line in HELD_OUT.findall(pipeline)] == [
        pytest.approx(numbers(line), abs=2e-3) for line in HELD_OUT.findall(stock)
    ]
    begun = losses(pretrain(folder, "lgamp", 1, folder / "packed-resumed", "--pack 32 --exit-interval 3"))
    rest = losses(pretrain(folder, "pipeline", 2, folder / "packed-resumed", "--pack 32"))
    assert len(begun) == len(rest) == 3
    assert {**begun, **rest} == pytest.approx(losses(stock), rel=OTHER_MICRO_BATCHES)
    config = json.loads((folder / "packed-pipeline" / "model" / "config.json").read_text())
    assert config["architectures"] == ["BertForPreTraining"]


@pytest.mark.slow
def test_what_it_learned_is_read_by_from_pretrained_and_fine_tuned(folder, stock):
    model = folder / "stock" / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    logits = AutoModelForMaskedLM.from_pretrained(model)(**tokenizer("the [MASK] fox", return_tensors="pt")).logits
    assert logits.shape == (1, 5 - 2, -(-len(tokenizer) // 8) * 8)
    words = f"--data {folder}/data.bert --model {model} --steps 4 --batch-size 8 --lr 1e-2"
    script = f"-m ds_lgamp run launch/finetune_bert.py --deepspeed_config {folder}/lgamp.json {words}"
    printed = torchrun(2, script.split())
    found = re.search(r"accuracy ([\d.]+) \(always the most frequent source: ([\d.]+)\)", printed)
    assert 0 < float(found[1]) <= 1 and 0.5 <= float(found[2]) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--steps 4 4 4", "--steps has 3 values for 2 sequence lengths; use 1 or 2"),
        ("--batch-size 7", "--batch-size is 7, which is no multiple of --micro-batch-size 2 times 1 ranks"),
        ("--max-position-embeddings 32", "--sequence-lengths has 64; raise --max-position-embeddings to it"),
        ("--sequence-lengths 32 48", "has shards of 32, 64, sources, not of 48; prepare those too"),
        ("--pack 32 32 32", "--pack has 3 values for 2 sequence lengths; use 1 or 2"),
        (
            "--pack 64",
            "--pack has pairs of 64 tokens for --sequence-lengths 32, whose rows cannot hold them; use pairs",
        ),
        ("--pack 16", "has shards of 32, 64, sources, not of 16; prepare those too"),
        ("--deepspeed_config FOLDER/empty.json", "which has no optimizer; write one, such as"),
        ("--data elsewhere", "--data is elsewhere, which has no index.json; write it with launch/prepare_data.py"),
    ],
)
def test_bad_flags_are_refused_in_one_sentence(folder, flags, words):
    with pytest.raises(AssertionError, match=re.escape(words)) as refusal:
        pretrain(folder, "lgamp", 1, folder / "refused", flags.replace("FOLDER", str(folder)))
    assert not losses(str(refusal.value))


@pytest.mark.slow
def test_a_checkpoint_that_learned_other_tokens_is_refused(folder, tmp_path):
    pretrain(folder, "lgamp", 1, tmp_path / "save", "--exit-interval 1")
    # Padded to a multiple of 8, both vocabularies make models of one size.
    prepare(tmp_path, folder / "1.txt", folder / "0.txt", flags="--vocab-size 199 --sequence-lengths 32 64 --shards 4")
    with pytest.raises(AssertionError, match="whose checkpoint learned the tokens of another tokenizer than that of"):
        pretrain(tmp_path, "lgamp", 1, tmp_path / "save", config=folder)


def test_prepared_data_are_kept_and_text_without_documents_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("\n\n \n")
    with pytest.raises(AssertionError, match="found 0 documents, need 20; separate them by blank lines"):
        prepare(tmp_path, tmp_path / "empty.txt")
    (tmp_path / "data.bert").mkdir()
    assert "already prepared" in prepare(tmp_path, tmp_path / "empty.txt")
