"""``ds_lgamp run --explain`` of experts that ranks divide says what these ranks then hold and send."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from deepspeed.utils import groups as stock_groups

import ds_lgamp
from ds_lgamp.runtime.measure import CollectiveCounter, PeakMemory, live_tensors, storage_of
from testing import ROOT
from testing.deepspeed_rank import prepare_rank, quiet
from testing.forks import run_module
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.explain.expert_models import EXPERTS, LENGTH, SCRIPT, mixtral, pipeline
from tests.slow import slow_except

MICRO_BATCHES, SAMPLES, COUNTED = 4, 2, 3
"""Of a rank in a step; of a micro-batch; and steps whose memory is measured."""


class Case(NamedTuple):
    """How a PipelineModule is trained."""

    expert_ranks: int
    data_ranks: int
    stage: int
    pipeline_ranks: int = 1

    @property
    def ranks(self) -> int:
        return self.data_ranks * self.pipeline_ranks

    @property
    def config(self) -> dict[str, Any]:
        return configuration(self.stage, {"layers_per_chunk": 1})


def configuration(stage: int, block: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "ds_lgamp": block,
    }


def explained(folder: Path, ranks: int, kind: str, config: dict[str, Any], *sizes: int, as_json: bool = True) -> Any:
    """Returns what ``--explain`` says of the script."""
    (folder / "script.py").write_text(SCRIPT)
    words = [str(folder / "script.py"), kind, json.dumps(config), *map(str, sizes)]
    given = ["--ranks", str(ranks), *(["--json"] if as_json else [])]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = run_module(["ds_lgamp", "run", "--explain", *given, *words], folder, environment)
    assert ended.status == 0, ended.complaints
    return json.loads(ended.output) if as_json else ended.output


def of_groups(counter: CollectiveCounter, engine: Any, expert_ranks: int) -> dict[str, list[tuple[str, int]]]:
    """Returns the collectives of all data-parallel ranks, of those that have the same experts, and of those that divide
    experts, each with the bytes it sends."""
    found = {"dense": counter.calls_in(engine.lgamp.data_group)}
    if expert_ranks > 1:
        name = f"ep_size_{expert_ranks}"
        found["experts"] = counter.calls_in(stock_groups._get_expert_data_parallel_group(name))
        found["tokens"] = counter.calls_in(stock_groups._get_expert_parallel_group(name))
    return found


def all_but(others: dict[int, Any]) -> Iterator[torch.Tensor]:
    return (tensor for tensor in live_tensors() if storage_of(tensor)._cdata not in others)


def pipelines_on_rank(cases: list[Case]) -> list[tuple[int, dict[str, list[tuple[str, int]]]]]:
    """Trains each. Returns the peak of memory and the collectives of a step on this rank."""
    prepare_rank()
    ds_lgamp.install()
    return [pipeline_on_rank(case) for case in cases]


def pipeline_on_rank(case: Case) -> tuple[int, dict[str, list[tuple[str, int]]]]:
    others = {storage._cdata: storage for storage in map(storage_of, live_tensors())}
    with quiet():
        engine = pipeline(case.config, case.expert_ranks, case.pipeline_ranks)
    assert type(engine).__module__.startswith("ds_lgamp.")
    peaks = []
    for _ in range(1 + COUNTED):
        with PeakMemory(all_but(others)) as memory, CollectiveCounter() as counter:
            engine.train_batch()
        peaks.append(memory.peak)
    # The first step learns shapes, and gloo's threads may free a tensor late.
    return min(peaks[1:]), of_groups(counter, engine, case.expert_ranks)


def counts(collectives: list[tuple[str, int]]) -> tuple[int, int, int]:
    """Returns the number of gathers and of reductions, and the bytes they send. gloo has no reduce-scatter."""
    kinds = Counter(kind for kind, _ in collectives)
    reduces = kinds["all_to_all"] + (kinds["all_reduce"] if "all_to_all" not in kinds else 0)
    return kinds["all_gather"], reduces, sum(size for kind, size in collectives if kind != "all_reduce")


PIPELINES = {
    "four ranks": [Case(2, 4, stage) for stage in (1, 2, 3)],
    "four ranks with all experts, and others": [Case(1, 4, 1), Case(1, 4, 2), Case(1, 4, 3), Case(4, 4, 3)],
    "two ranks": [Case(experts, 2, stage) for experts in (1, 2) for stage in (1, 2, 3)],
    "two pipelines": [Case(2, 2, 1, 2), Case(2, 2, 3, 2)],
}


@pytest.mark.parametrize("group", slow_except(["four ranks"], [*PIPELINES]))
def test_a_pipeline_holds_and_sends_what_explain_says(group, tmp_path):
    cases = PIPELINES[group]
    measured = run_on_ranks(cases[0].ranks, pipelines_on_rank, cases)
    for number, case in enumerate(cases):
        facts = explained(tmp_path, case.ranks, "pipeline", case.config, case.expert_ranks, case.pipeline_ranks)
        assert facts["activations_unknown"] is None
        for rank, shown in enumerate(facts["ranks"]):
            peak, collectives = measured[rank * case.data_ranks][number]
            assert 0 <= peak - shown["memory"]["peak"] <= 0.01 * peak, (case, rank)
            moved = shown["traffic"]
            gathers, reduces, dense_bytes = counts(collectives["dense"])
            assert (gathers, reduces) == (moved["gathers"], moved["reduces"]), case
            sent = dense_bytes
            if case.expert_ranks > 1:
                gathers, reduces, of_experts = counts(collectives["experts"])
                assert (gathers, reduces) == (moved["expert_gathers"], moved["expert_reduces"]), case
                assert [units["bytes_sent"] for units in shown["shared"]] == [dense_bytes, of_experts], case
                tokens = shown["tokens"]
                assert tokens["calls"] * MICRO_BATCHES == len(collectives["tokens"]), case
                assert tokens["step_bytes"] == sum(size for _, size in collectives["tokens"]), case
                sent += of_experts
            assert shown["collective_bytes_sent"] == sent, case
