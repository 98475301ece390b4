"""``ds_lgamp run --explain`` of experts that ranks divide says what these ranks then hold and send."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.utils import groups as stock_groups

import ds_lgamp
from ds_lgamp.runtime.measure import CollectiveCounter, PeakMemory, live_tensors, storage_of
from testing import ROOT
from testing.deepspeed_rank import prepare_rank, quiet
from testing.forks import Ended, run_module
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.explain.expert_models import EXPERTS, LENGTH, SCRIPT, mixtral, pipeline
from tests.integrations.deepspeed.explain.test_explain import on_islands
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
    ended = run_explain(folder, ranks, kind, config, *sizes, options=["--json"] if as_json else [])
    assert ended.status == 0, ended.complaints
    return json.loads(ended.output) if as_json else ended.output


def run_explain(
    folder: Path, ranks: int, kind: str, config: dict[str, Any], *sizes: int, options: Sequence[str] = ()
) -> Ended:
    (folder / "script.py").write_text(SCRIPT)
    words = [str(folder / "script.py"), kind, json.dumps(config), *map(str, sizes)]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return run_module(["ds_lgamp", "run", "--explain", "--ranks", str(ranks), *options, *words], folder, environment)


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
    return kinds["all_gather"], kinds["all_to_all"], sum(size for kind, size in collectives if kind != "all_reduce")


PIPELINES = {
    "four ranks": [Case(2, 4, 3)],
    "other experts on four ranks": [
        Case(2, 4, 1),
        Case(2, 4, 2),
        *(Case(1, 4, stage) for stage in (1, 2, 3)),
        Case(4, 4, 3),
    ],
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
                assert tokens["all_to_alls"] * MICRO_BATCHES == len(collectives["tokens"]), case
                assert tokens["each_step"] == sum(size for _, size in collectives["tokens"]), case
                sent += of_experts
            assert shown["collective_bytes_sent"] == sent, case


class AutoEp(NamedTuple):
    """How a model of transformers is trained by AutoEP."""

    expert_ranks: int
    stage: int
    pipeline_ranks: int = 1
    more: Any = None

    @property
    def config(self) -> dict[str, Any]:
        divided = {"enabled": True, "autoep_size": self.expert_ranks}
        block = {"pipeline_ranks": self.pipeline_ranks, "layers_per_chunk": 1}
        return {**configuration(self.stage, block), "expert_parallel": divided, **(self.more or {})}


def balanced(layer: Any, _given: Any, logits: torch.Tensor) -> torch.Tensor:
    """Lets every expert get as many tokens."""
    tokens, chosen = torch.arange(len(logits)), 2
    experts = (chosen * tokens[:, None] + torch.arange(chosen)) % EXPERTS
    return logits * 0.01 + torch.zeros_like(logits).scatter(1, experts, 10.0)


class Held:
    """Follows what the units of an engine hold, by how many ranks share them."""

    def __init__(self, engine: Any, patch: pytest.MonkeyPatch) -> None:
        self.engine, self.partition = engine, engine.optimizer.partition
        self.most: dict[str, Counter[int]] = {"resident_weights": Counter(), "gradients": Counter()}
        for kind, name, bytes_of in (
            ("resident_weights", "gather", lambda unit: resident(unit)),
            ("gradients", "finish_gradients", lambda unit: unit.reduction.shard_gradient.nbytes),
        ):
            patch.setattr(self.partition, name, self.following(getattr(self.partition, name), kind, bytes_of))

    def following(self, act: Any, kind: str, bytes_of: Any) -> Any:
        def followed(*given: Any) -> None:
            act(*given)
            self.most[kind] |= self.by_sharing(bytes_of)

        return followed

    def by_sharing(self, bytes_of: Any) -> Counter[int]:
        held: Counter[int] = Counter()
        for unit in self.partition.units:
            held[unit.policy.data_group.size()] += bytes_of(unit)
        return held

    def facts(self) -> dict[str, Counter[int]]:
        """Returns the bytes of every kind by the number of ranks that share them, between steps or at the highest."""
        return {**self.most, "weights": self.by_sharing(weights), "optimizer_state": self.by_sharing(self.state)}

    def state(self, unit: Any) -> int:
        state = self.engine.optimizer.optimizer.state
        kept = (state[segment.shard][name] for segment in unit.master.segments for name in ("exp_avg", "exp_avg_sq"))
        return sum(tensor.nbytes for tensor in kept)


def resident(unit: Any) -> int:
    return storage_of(unit.storage.flat).nbytes() if unit.storage.frees_weights else 0


def weights(unit: Any) -> int:
    own = unit.storage.kept if unit.storage.frees_weights else unit.storage.flat
    return storage_of(own).nbytes()


def scripts_on_rank(cases: list[AutoEp]) -> list[tuple[dict[str, Counter[int]], dict[str, list[tuple[str, int]]]]]:
    """Trains each. Returns what units hold, and the collectives of a step, on this rank."""
    prepare_rank()
    ds_lgamp.install()
    return [script_on_rank(case) for case in cases]


def script_on_rank(case: AutoEp) -> tuple[dict[str, Counter[int]], dict[str, list[tuple[str, int]]]]:
    with quiet():
        engine = mixtral(case.config)
    assert type(engine).__module__.startswith("ds_lgamp.")
    for layer in engine.module.modules():
        if isinstance(layer, AutoEPMoELayer):
            layer.router.gate.register_forward_hook(balanced)
    tokens = torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH)
    with pytest.MonkeyPatch.context() as patch:
        held = Held(engine, patch)
        for _ in range(2):
            with CollectiveCounter() as counter:
                for _ in range(MICRO_BATCHES):
                    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
                    engine.step()
        return held.facts(), of_groups(counter, engine, case.expert_ranks)


AUTO_EP = {
    "one pipeline": [AutoEp(2, 0), AutoEp(2, 3)],
    "other stages and ranks": [
        AutoEp(2, 1),
        AutoEp(2, 2),
        AutoEp(4, 3),
        AutoEp(2, 3, more={"bf16": {"enabled": True}}),
    ],
    "two pipelines": [AutoEp(2, 1, 2), AutoEp(2, 3, 2)],
}


@pytest.mark.parametrize("group", slow_except(["one pipeline"], [*AUTO_EP]))
def test_experts_of_auto_ep_are_held_and_moved_as_explain_says(group, tmp_path):
    cases, ranks = AUTO_EP[group], 4
    measured = run_on_ranks(ranks, scripts_on_rank, cases)
    for number, case in enumerate(cases):
        facts = explained(tmp_path, ranks, "mixtral", case.config)
        data_ranks = ranks // case.pipeline_ranks
        for rank, shown in enumerate(facts["ranks"]):
            held, collectives = measured[rank * data_ranks][number]
            for units, name in zip(shown["shared"], ("dense", "experts"), strict=True):
                sharing = units["sharing_ranks"]
                assert sharing == data_ranks // units["expert_ranks"]
                for kind, by_sharing in held.items():
                    assert units["memory"][kind] == by_sharing[sharing], (case, rank, kind, sharing)
                kinds = Counter(kind for kind, _ in collectives[name])
                if case.stage > 0:
                    assert (units["gathers"], units["reduces"]) == (kinds["all_gather"], kinds["all_to_all"]), case
            tokens, calls = shown["tokens"], collectives["tokens"]
            assert tokens["all_to_alls"] * case.pipeline_ranks * MICRO_BATCHES == len(calls), case
            # The same tokens on all ranks, and as many for every expert.
            each = SAMPLES * LENGTH * tokens["each_token"] + tokens["numbers_of_tokens"]
            assert each * case.pipeline_ranks * MICRO_BATCHES == sum(size for _, size in calls), case
            assert tokens["each_micro_batch"] is None


def test_words_tell_what_is_divided_and_what_is_known_of_tokens(tmp_path):
    said = explained(tmp_path, 8, "mixtral", AutoEp(2, 3, 2).config, as_json=False)
    assert re.search(r"^ +0 +experts, 1/2 of all +2 +\d", said, re.MULTILINE)
    assert re.search(r"^ +1 +dense +4 +\d", said, re.MULTILINE)
    assert "known for each token only, because the script gives micro-batches to the engine only after" in said
    assert "the balanced case, in which every expert gets as many tokens" in said
    assert "Experts that no other rank has" not in said
    assert re.search(r"^rank +layers +all-to-alls +each token +numbers of tokens", said, re.MULTILINE)
    said = explained(tmp_path, 2, "pipeline", Case(2, 2, 3).config, 2, 1, as_json=False)
    assert "Experts that no other rank has are neither gathered, nor reduced, nor partitioned." in said
    assert "All-to-alls send the capacity of experts, whatever the routing" in said and "known for each" not in said


def test_on_a_cluster_layers_with_experts_follow_speeds(tmp_path):
    """The explanation is made again with the speeds, of a model whose experts are replaced already."""
    options = ["--json", "--cluster", on_islands(tmp_path)]
    config = AutoEp(2, 3, more={"ds_lgamp": {"pipeline_ranks": 2}}).config
    ended = run_explain(tmp_path, 4, "mixtral", config, options=options)
    assert ended.status == 0, ended.complaints
    facts = json.loads(ended.output)
    assert facts["pipeline_rank_speeds"] == [2, 1]
    assert [rank["tokens"]["layers"] for rank in facts["ranks"]] == [3, 1]


def test_what_the_engine_refuses_around_experts_is_not_explained(tmp_path):
    shards = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}
    ended = run_explain(tmp_path, 4, "mixtral", AutoEp(2, 3, more=shards).config)
    assert ended.status == 2
    assert "ranks divide the experts of a layer (ep_size 2), but zero_hpz_partition_size" in ended.complaints
