"""A run saves, loads and continues with every source of micro-batches. Its own data continue at their position, and a
script's iterator continues where the script left it."""

from itertools import islice, product
from pathlib import Path
from typing import NamedTuple

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule

import ds_lgamp
from ds_lgamp.checkpoint.folder import read_state
from ds_lgamp.checkpoint.whole import read_whole, write_whole
from testing.checkpoints import forge_state, inside
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.linear import linears, mean_square
from tests.integrations.deepspeed.models import seed

DATA = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).tolist()
ROWS, MICRO_BATCHES = 4, 2
SAVED, STEPS = 3, 6
"""When the run is saved, 6 of 10 micro-batches of its own data, or of 5 for each of two data-parallel ranks, are taken.
At its end, 12 are taken."""


class Layout(NamedTuple):
    layers: int
    pipeline_ranks: int


BLOCK = {"layers_per_chunk": 1}
LAYOUTS = {"loss on the first rank": Layout(3, 2), "loss on the second of four ranks": Layout(6, 4)}


def collate(samples):
    return torch.tensor(samples), torch.zeros(len(samples), 6)


def endless(start, position):
    """Returns an endless iterator of micro-batches from ``position`` on."""
    generator = torch.Generator().manual_seed(start)
    rows = (torch.randn(ROWS, 6, generator=generator) for _ in iter(int, 1))
    return islice(((row, torch.zeros(ROWS, 6)) for row in rows), position, None)


def own_data(engine, loader, step):
    return lambda: None


def iterator_of_initialize(engine, loader, step):
    """Keeps the loader that initialize returns over a load, as scripts without a pipeline do."""
    held = iter(loader)
    return lambda: held


def data_iter(engine, loader, step):
    held = endless(9, MICRO_BATCHES * step)
    return lambda: held


def data_iterator_of_every_step(engine, loader, step):
    return lambda: endless(engine.global_steps, 0)


def set_dataiterator(engine, loader, step):
    engine.set_dataiterator(endless(9, MICRO_BATCHES * step))
    return lambda: None


def doubling(engine, loader, step):
    engine.set_batch_fn(lambda batch: (batch[0] * 2, batch[1]))
    return lambda: None


def making(engine, loader, step):
    """Only the batch function makes data."""
    made = endless(9, MICRO_BATCHES * step)
    engine.set_batch_fn(lambda batch: next(made) if batch is None else batch)
    return lambda: None


SOURCES = {
    "training_data": (own_data, True),
    "training_data as an iterator": (iterator_of_initialize, True),
    "data_iter": (data_iter, False),
    "data_iter beside training_data": (data_iter, True),
    "data_iter of every step": (data_iterator_of_every_step, True),
    "set_dataiterator": (set_dataiterator, False),
    "set_dataiterator beside training_data": (set_dataiterator, True),
    "set_batch_fn on training_data": (doubling, True),
    "set_batch_fn alone": (making, False),
}
"""How a script feeds an engine, and whether the engine has training_data."""
OF_OWN_DATA = ("training_data", "training_data as an iterator", "set_batch_fn on training_data")
CASES = list(product(["loss on the first rank"], SOURCES, [False, True]))
"""Cases on two ranks: the layout, the source of data, and whether evaluations run between steps."""
CASES_PER_SPAWN = 3
"""Each case has three engines with their own process groups. With very many in one process, gloo stalls."""
WIDER_CASES = list(product(LAYOUTS, ["training_data", "data_iter"], [True]))
"""Cases on four ranks."""


def engine_of(layout, block, with_data):
    ds_lgamp.install()
    with quiet():
        options = {"num_stages": layout.pipeline_ranks, "loss_fn": mean_square, "seed_layers": True, "seed_fn": seed}
        module = PipelineModule(linears(layout.layers), **options)
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        }
        # Building layers has drawn a different number of random numbers on each rank.
        torch.manual_seed(5)
        engine, _, loader, _ = deepspeed.initialize(
            model=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.5),
            training_data=DATA if with_data else None,
            collate_fn=collate,
            config=config | ({} if block is None else {"ds_lgamp": block}),
        )
    return engine, loader


def steps(engine, feed, evaluated, count):
    """Trains. Returns losses of training and evaluation, and the sum of the logits where a rank has them."""
    results = []
    for _ in range(count):
        results.append(engine.train_batch(feed()).item())
        if evaluated:
            results.append(engine.eval_batch(endless(100 + engine.global_steps, 0)).item())
            loss, logits = engine.eval_batch(endless(200 + engine.global_steps, 0), return_logits=True)
            results += [loss.item(), None if logits is None else logits.sum().item()]
    return results


class Run(NamedTuple):
    stock: list
    uninterrupted: list
    resumed: list
    pulled: int
    data: dict | None
    """The position in the data as the checkpoint stores it."""


def run_case(folder, layout, source, evaluated):
    feeding, with_data = SOURCES[source]
    stock, loader = engine_of(layout, None, with_data)
    expected = steps(stock, feeding(stock, loader, 0), evaluated, STEPS)
    engine, loader = engine_of(layout, BLOCK, with_data)
    feed = feeding(engine, loader, 0)
    before = steps(engine, feed, evaluated, SAVED)
    engine.save_checkpoint(folder)
    losses = before + steps(engine, feed, evaluated, STEPS - SAVED)
    fresh, loader = engine_of(layout, BLOCK, with_data)
    # Builds the iterator before the load, as scripts do that build everything first.
    feed = feeding(fresh, loader, SAVED)
    fresh.load_checkpoint(folder)
    again = before + steps(fresh, feed, evaluated, STEPS - SAVED)
    state = read_state(Path(folder) / f"global_step{SAVED}")
    return Run(expected, losses, again, state["counters"]["_pulled_of_training_data"], state["data"])


def drawn_after(folder):
    """Returns this rank's draws after an engine with own data was built, and after it loaded a position in the data
    without random states."""
    engine, _ = engine_of(LAYOUTS["loss on the second of four ranks"], BLOCK, True)
    drawn = [torch.rand(2).tolist()]
    engine.train_batch()
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    if dist.get_rank() == 0:
        write_whole(Path(folder) / "again", read_whole(Path(folder) / "global_step1"))
    dist.barrier()
    torch.manual_seed(5)
    engine.load_checkpoint(folder, tag="again")
    return [*drawn, torch.rand(2).tolist()]


def own_data_then_an_iterator(folder):
    """Returns the position in the own data when a script changed to its own iterator.

    Also returns the next micro-batches, before and after the run loads that checkpoint.
    """
    layout = LAYOUTS["loss on the first rank"]
    engine, loader = engine_of(layout, BLOCK, True)
    held = iter(loader)
    engine.train_batch()
    engine.train_batch(endless(0, 0))
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    pulled = read_state(Path(folder) / "global_step2")["counters"]["_pulled_of_training_data"]
    followed = [next(held)[0].tolist() for _ in range(3)]
    engine.load_checkpoint(folder)
    return pulled, followed, [next(held)[0].tolist() for _ in range(3)]


def without_data_there(folder):
    """Saves a run that makes its own micro-batches. A run with own data resumes it and begins at the start of its
    data."""
    layout = LAYOUTS["loss on the first rank"]
    engine, loader = engine_of(layout, BLOCK, False)
    feed = making(engine, loader, 0)
    steps(engine, feed, False, SAVED)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    if dist.get_rank() == 0:
        # The first release stored this count.
        forge_state(Path(folder) / f"global_step{SAVED}", inside("counters/_pulled_of_training_data", 6))
    dist.barrier()
    fresh, loader = engine_of(layout, BLOCK, True)
    fresh.load_checkpoint(folder)
    return next(iter(loader))[0].tolist()


def run_cases(folder, cases):
    return {
        case: run_case(str(Path(folder) / str(number)), LAYOUTS[case[0]], *case[1:])
        for number, case in enumerate(cases)
    }


def run_some(folder, cases):
    prepare_rank()
    return run_cases(folder, cases)


def run_others(folder):
    prepare_rank()
    return {
        "left": own_data_then_an_iterator(str(Path(folder) / "left")),
        "without": without_data_there(str(Path(folder) / "without")),
    }


def run_four(folder):
    prepare_rank()
    return {**run_cases(folder, WIDER_CASES), "drawn": drawn_after(str(Path(folder) / "drawn"))}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Returns the results by rank."""
    results = run_on_ranks(2, run_others, str(tmp_path_factory.mktemp("two")))
    for start in range(0, len(CASES), CASES_PER_SPAWN):
        cases = CASES[start : start + CASES_PER_SPAWN]
        for rank, found in enumerate(run_on_ranks(2, run_some, str(tmp_path_factory.mktemp("two")), cases)):
            results[rank] |= found
    return results


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return run_on_ranks(4, run_four, str(tmp_path_factory.mktemp("four")))


def check(results, case):
    for rank in results:
        run = rank[case]
        assert run.resumed == run.uninterrupted
        taken = SAVED * MICRO_BATCHES if case[1] in OF_OWN_DATA else 0
        assert run.pulled == taken and (run.data is not None) == SOURCES[case[1]][1]
    # The logits are on the rank of the loss, which is another rank.
    stock, layered = (everywhere(getattr(rank[case], kind) for rank in results) for kind in ("stock", "uninterrupted"))
    assert layered == pytest.approx(stock, rel=1e-5)


def everywhere(ranks):
    """Returns for every position the value of the rank that has one."""
    return [next(value for value in values if value is not None) for values in zip(*ranks)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_computes_what_stock_deepspeed_does_and_resumes_where_it_was(two, case):
    check(two, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", WIDER_CASES, ids=str)
def test_a_run_on_four_ranks_computes_what_stock_deepspeed_does_and_resumes_where_it_was(four, case):
    check(four, case)


@pytest.mark.slow
def test_ranks_go_on_drawing_alike_when_own_data_are_built_and_found_again(four):
    """A script that shuffles its data then gets the same order for inputs and for labels."""
    first, *others = (rank["drawn"] for rank in four)
    assert all(drawn == first for drawn in others)


@pytest.mark.slow
def test_the_position_in_own_data_counts_what_a_script_takes_of_them(two):
    pulled, followed, again = two[0]["left"]
    assert pulled == MICRO_BATCHES and again == followed


@pytest.mark.slow
def test_data_of_the_script_are_no_position_in_own_data(two):
    assert two[0]["without"] == torch.tensor(DATA[:ROWS]).tolist()
