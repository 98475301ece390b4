"""Layers of Megatron-core under DeepSpeed compute head and loss in pieces of rows."""

import json
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch

from testing import ROOT
from testing.forks import run_module
from testing.pieces import watch_pieces
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.models import seed
from tests.slow import slow_except

PIECE, VOCABULARY, SEQUENCE, STEPS = 5, 64, 16, 2
BF16, RECOMPUTED = "bf16, with losses in 32 bits", "a last chunk that is recomputed"


class Found(NamedTuple):
    losses: list[float]
    evaluated: float
    """The loss of an evaluation."""
    largest: float
    """The largest of the logits that an evaluation returns."""
    norms: list[float]
    pieces: list[int]
    """Rows of every piece."""
    maxima: int
    """How often ranks looked for their largest logits together."""


def train_on_rank(
    cases: dict[str, tuple[bool, dict[str, Any]]], tensor_ranks: int = 1, sequence_parallel: bool = False
) -> dict[str, Found]:
    """Trains by case."""
    import deepspeed
    import torch.distributed as dist
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
    from megatron.core.transformer import TransformerConfig

    import ds_lgamp
    from ds_lgamp.integrations.megatron.layers.gpt_layers import gpt_layer_specs, language_model_loss
    from ds_lgamp.integrations.user_script import finish_engines
    from testing.deepspeed_rank import prepare_rank, quiet
    from tests.integrations.megatron.on_cpu import start_megatron

    prepare_rank()
    start_megatron(tensor_ranks)
    ds_lgamp.install()
    found = {}
    for name, (tied, block) in cases.items():
        with pytest.MonkeyPatch.context() as patch, quiet():
            pieces, maxima = watch_pieces(patch.setattr), count_maxima(patch.setattr)
            sizes = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "use_cpu_initialization": True}
            slices = {"tensor_model_parallel_size": tensor_ranks, "sequence_parallel": sequence_parallel}
            config = TransformerConfig(**sizes, **slices, hidden_dropout=0.0, attention_dropout=0.0)
            specs = gpt_layer_specs(config, VOCABULARY, SEQUENCE, "rope", tied)
            loss_fn = language_model_loss if name != "a loss of the script" else own_loss
            topology = PipeModelDataParallelTopology(dist.get_world_size() // tensor_ranks, tensor_ranks, 1)
            module = PipelineModule(specs, topology=topology, loss_fn=loss_fn, seed_layers=True, seed_fn=seed)
            settings = {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 4,
                "zero_optimization": {"stage": 2},
                "zero_allow_untested_optimizer": True,
                "bf16": {"enabled": name == BF16},
                "ds_lgamp": block,
            }
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
            losses, norms = [], []
            for step in range(STEPS):
                losses.append(float(engine.train_batch(iter(batches(step)))))
                norms.append(float(engine.get_global_grad_norm()))
            evaluated, used = engine.eval_batch(iter(batches(9))), ([*pieces], len(maxima))
            _, logits = engine.eval_batch(iter(batches(9)), return_logits=True)
            outputs = engine.eval_batch(iter(batches(9)), compute_loss=False, reduce_output=None)
            # Megatron-core's loss changes the logits that it gets.
            assert logits is None or torch.equal(logits, outputs[-1])
            finish_engines()
        largest = 0.0 if logits is None else logits.abs().max().item()
        found[name] = Found(losses, float(evaluated), largest, norms, *used)
    return found


def count_maxima(replace: Callable[[Any, str, Any], None]) -> list[None]:
    """Returns a list that grows with every all-reduce of the largest numbers."""
    import torch.distributed as dist

    seen: list[None] = []
    stock = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        seen.extend([None] * (op == dist.ReduceOp.MAX and tensor.dim() > 0 and dist.get_world_size(group) > 1))
        return stock(tensor, op, group, async_op)

    replace(dist, "all_reduce", all_reduce)
    return seen


def own_loss(logits: torch.Tensor, labels: Any) -> torch.Tensor:
    targets, _ = labels
    return torch.nn.functional.cross_entropy(logits.float().permute(1, 2, 0), targets)


def batches(step: int) -> list[Any]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (4, 2, SEQUENCE + 1), generator=generator)
    masks = torch.rand(4, 2, SEQUENCE, generator=generator).round()
    return [(each[:, :-1], (each[:, 1:].contiguous(), mask)) for each, mask in zip(tokens, masks)]


CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "untied": (False, {}),
    "tied": (True, {}),
    RECOMPUTED: (False, {"schedule": "gpipe"}),
    "nonfinite numbers are looked for": (False, {"nonfinite": "skip"}),
    "a loss of the script": (False, {}),
    BF16: (False, {}),
}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_layers_train_in_pieces_as_with_whole_logits(ranks):
    in_pieces, whole = (
        run_on_ranks(
            ranks,
            train_on_rank,
            {name: (tied, {**block, "loss_chunk": rows}) for name, (tied, block) in CASES.items()},
        )
        for rows in (PIECE, 0)
    )
    for name in CASES:
        used = [rows for found in in_pieces for rows in found[name].pieces]
        assert not any(found[name].pieces for found in whole)
        assert (max(used, default=0) == PIECE) == (name != "a loss of the script"), name
        for found, expected in zip(in_pieces, whole):
            assert_alike(found[name], expected[name], name == BF16)


def assert_alike(found: Found, expected: Found, rounds: bool, tolerance: float = 1e-6) -> None:
    """Compares losses and norms to a ``tolerance``, or to 16 bits."""
    # Rounded to 16 bits, losses of four would be off by up to a hundredth.
    for name, rounded in (("losses", 2e-4), ("evaluated", 2e-4), ("largest", 2e-2), ("norms", 5e-3)):
        near = pytest.approx(getattr(expected, name), rel=rounded if rounds else tolerance)
        assert getattr(found, name) == near, name


@pytest.mark.parametrize(
    ("ranks", "sequence_parallel"), slow_except([(2, True)], [(2, True), (2, False), (4, True)], several=True)
)
def test_ranks_with_slices_of_the_vocabulary_train_in_pieces_as_one_process_does(ranks, sequence_parallel):
    """Two ranks have half of the words each. For every piece they find the largest logits together once, beside two
    sums, and they exchange hidden states as with whole logits."""
    cases = {name: case for name, case in CASES.items() if name != "a loss of the script"}
    asked = {
        rows: {name: (tied, {**block, "loss_chunk": rows}) for name, (tied, block) in cases.items()}
        for rows in (PIECE, 0)
    }
    [alone] = run_on_ranks(1, train_on_rank, asked[0])
    in_pieces, whole = (run_on_ranks(ranks, train_on_rank, asked[rows], 2, sequence_parallel) for rows in (PIECE, 0))
    for name in cases:
        for found, expected in zip(in_pieces, whole):
            assert_alike(found[name], expected[name], name == BF16)
            # Logits that an evaluation returns are those of a slice.
            own = alone[name]._replace(largest=found[name].largest)
            assert_alike(found[name], own, name == BF16, 1e-5)
            assert not expected[name].pieces
        losses = 4 * (1 + STEPS * (2 if name == RECOMPUTED else 1))
        for found, expected in zip(in_pieces[-2:], whole[-2:]):
            assert max(found[name].pieces) == PIECE and len(found[name].pieces) == losses * -(-2 * SEQUENCE // PIECE)
            assert found[name].maxima - expected[name].maxima == len(found[name].pieces) - losses


WORDS = 4096
SCRIPT = """
import deepspeed
from tests.integrations.megatron.layers.test_loss_in_pieces import Sizes, engine_of

deepspeed.init_distributed("gloo")
engine_of({sizes})
"""


class Sizes(NamedTuple):
    """A model on pipeline ranks of two tensor-parallel ranks each, and its micro-batches."""

    sequence_parallel: bool
    pipeline_ranks: int = 1
    layers: int = 4
    hidden: int = 32
    sequences: int = 2
    length: int = 64
    loss_chunk: int = 16


class Tokens(torch.utils.data.Dataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> Any:
        tokens = torch.arange(number, number + self.length) % WORDS
        return tokens, (tokens, torch.ones(self.length))


def engine_of(sizes: Sizes) -> Any:
    """Returns the engine of ranks with slices of many words, whose logits need most memory if they are whole."""
    import deepspeed
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
    from megatron.core.transformer import TransformerConfig

    from ds_lgamp.integrations.megatron.layers.gpt_layers import gpt_layer_specs, language_model_loss
    from tests.integrations.megatron.on_cpu import start_megatron

    start_megatron(2)
    model = {"num_layers": sizes.layers, "hidden_size": sizes.hidden, "num_attention_heads": 4}
    slices = {"tensor_model_parallel_size": 2, "sequence_parallel": sizes.sequence_parallel}
    config = TransformerConfig(
        **model, **slices, use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0
    )
    specs = gpt_layer_specs(config, WORDS, sizes.length, "rope", False)
    topology = PipeModelDataParallelTopology(sizes.pipeline_ranks, 2, 1)
    module = PipelineModule(specs, topology=topology, loss_fn=language_model_loss)
    settings = {
        "train_micro_batch_size_per_gpu": sizes.sequences,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 1},
        "ds_lgamp": {"loss_chunk": sizes.loss_chunk},
    }
    optimizer, data = torch.optim.AdamW(module.parameters(), fused=True), Tokens(sizes.length)
    return deepspeed.initialize(model=module, optimizer=optimizer, training_data=data, config=settings)[0]


def measure_on_rank(sizes: Sizes) -> int:
    """Returns the most bytes of live tensors in a step."""
    import ds_lgamp
    from ds_lgamp.runtime.measure import PeakMemory, live_tensors, storage_of
    from testing.deepspeed_rank import prepare_rank, quiet

    prepare_rank()
    ds_lgamp.install()
    others = {storage_of(tensor)._cdata: tensor for tensor in live_tensors()}
    with quiet():
        engine = engine_of(sizes)
    peaks = []
    for _ in range(3):
        with PeakMemory(each for each in live_tensors() if storage_of(each)._cdata not in others) as memory:
            engine.train_batch()
        peaks.append(memory.peak)
    # The first step learns shapes, and gloo's threads may free a tensor late.
    return min(peaks[1:])


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_explain_knows_what_pieces_of_slices_take(sequence_parallel, tmp_path):
    sizes = Sizes(sequence_parallel)
    (tmp_path / "script.py").write_text(SCRIPT.format(sizes=sizes))
    words = ["ds_lgamp", "run", "--explain", "--json", "--ranks", "2", str(tmp_path / "script.py")]
    ended = run_module(words, tmp_path, {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert ended.status == 0, ended.complaints
    [rank] = json.loads(ended.output)["ranks"]
    for measured in run_on_ranks(2, measure_on_rank, sizes):
        assert rank["memory"]["peak"] == pytest.approx(measured, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_last_pipeline_rank_needs_hardly_more_than_the_median_one(sequence_parallel):
    """With four words for every token of a micro-batch, as 128k words and 32k tokens."""
    sizes = Sizes(sequence_parallel, 3, layers=9, hidden=128, sequences=4, length=256, loss_chunk=32)
    measured = run_on_ranks(6, measure_on_rank, sizes)
    assert max(measured[4:]) <= 1.1 * median(measured), measured
