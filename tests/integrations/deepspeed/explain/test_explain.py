"""``ds_lgamp run --explain`` reports what the engine then does."""

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
import torch.distributed as dist

from ds_lgamp.cli.cluster import laid_out_on
from ds_lgamp.runtime.measure import CollectiveCounter
from testing import ROOT, SCRIPTS
from testing.forks import HANGS_AFTER, run_module
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.explain.scripts import DATA_SCRIPT, MODEL_SCRIPT, UNUSUAL_SCRIPT

SCRIPT = SCRIPTS / "public_example.py"
EXPLAIN = ["ds_lgamp", "run", "--explain"]
TWO_RANKS = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
"""An environment with a number of ranks, which ``--ranks`` overrides."""
BATCH = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
LAYERED = {**BATCH, "zero_optimization": {"stage": 3}, "communication_data_type": "bf16", "ds_lgamp": {}}
NODES = {"stage": 3, "zero_hpz_partition_size": 2}
HOST = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
LIVE = {"ds_lgamp": {"live_checkpoint": "live"}}
UNUSUAL_CONFIG = {
    **BATCH,
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}},
    "ds_lgamp": {"layers_per_chunk": 1, "micro_batch_group": 2},
}
ROUNDED_CONFIG = {**UNUSUAL_CONFIG, "ds_lgamp": {**UNUSUAL_CONFIG["ds_lgamp"], "activation_dtype": "fp8"}}


def within(memory):
    block = {"recompute": "auto"} if memory is None else {"recompute": "auto", "recompute_memory": memory}
    return {**UNUSUAL_CONFIG, "ds_lgamp": {**UNUSUAL_CONFIG["ds_lgamp"], **block}}


WITHOUT_OPTIMIZER = {key: value for key, value in UNUSUAL_CONFIG.items() if key != "optimizer"}
COMPILED = {**WITHOUT_OPTIMIZER, "ds_lgamp": {**WITHOUT_OPTIMIZER["ds_lgamp"], "compile": True}}
MODEL_CONFIG = {**BATCH, "zero_optimization": {"stage": 3}, "ds_lgamp": {"pipeline_ranks": 2}}
INSIDE_CONFIG = {**MODEL_CONFIG, "ds_lgamp": {"pipeline_ranks": 2, "model": "inside"}}
BY_HAND_CONFIG = {**MODEL_CONFIG, "gradient_accumulation_steps": 2 * 4, "ds_lgamp": {}}
"""A pipeline of two ranks computes the micro-batches of both."""


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    """Returns the outcomes of several explanations by name."""
    folder = tmp_path_factory.mktemp("explain")
    (folder / "unusual.py").write_text(UNUSUAL_SCRIPT)
    (folder / "data.py").write_text(DATA_SCRIPT)
    (folder / "model.py").write_text(MODEL_SCRIPT)
    (folder / "empty.py").write_text("print('no engine here')")
    runs = {
        "json": ["--ranks", "4", "--json", *on_example(folder, "json", LAYERED)],
        "unusual": ["--json", str(folder / "unusual.py"), json.dumps(UNUSUAL_CONFIG)],
        "data": ["--json", str(folder / "data.py"), json.dumps(UNUSUAL_CONFIG), "patient"],
        "budget": ["--json", str(folder / "data.py"), json.dumps(within("50 kB")), "patient"],
        "budget in words": [str(folder / "data.py"), json.dumps(within("50 kB")), "patient"],
        "budget later": [str(folder / "data.py"), json.dumps(within("50 kB")), "picky"],
        "no budget": [str(folder / "data.py"), json.dumps(within(None)), "patient"],
        "shared": [str(folder / "data.py"), json.dumps(within("50 kB")), "shared"],
        "small budget": [str(folder / "data.py"), json.dumps(within("9 kB")), "patient"],
        "data in words": [str(folder / "data.py"), json.dumps(ROUNDED_CONFIG), "patient"],
        "model": ["--ranks", "4", "--json", str(folder / "model.py"), json.dumps(MODEL_CONFIG), "as it is"],
        "by hand": ["--ranks", "4", "--json", str(folder / "model.py"), json.dumps(BY_HAND_CONFIG), "by hand"],
        "experts": ["--ranks", "4", str(folder / "model.py"), json.dumps(MODEL_CONFIG), "experts"],
        "inside": ["--ranks", "4", str(folder / "model.py"), json.dumps(INSIDE_CONFIG), "inside"],
        "late": ["--json", str(folder / "data.py"), json.dumps(WITHOUT_OPTIMIZER), "patient"],
        "late in words": [str(folder / "data.py"), json.dumps(COMPILED), "patient"],
        "picky": [str(folder / "data.py"), json.dumps(UNUSUAL_CONFIG), "picky"],
        "text": ["--ranks", "2", *on_example(folder, "text", LAYERED), "--stages", "1"],
        "cluster": ["--ranks", "4", "--json", "--cluster", on_islands(folder), *on_example(folder, "cluster", LAYERED)],
        "shares": ["--ranks", "4", "--cluster", on_islands(folder), *on_example(folder, "s", LAYERED), "--stages", "1"],
        "nodes": [
            *("--ranks", "4", "--json", "--cluster", on_islands(folder)),
            *(*on_example(folder, "nodes", {**LAYERED, "zero_optimization": NODES}), "--stages", "1"),
        ],
        "host": ["--ranks", "4", "--json", *on_example(folder, "host", {**LAYERED, "zero_optimization": HOST, **LIVE})],
        "order": [
            *("--ranks", "4", "--cluster", on_islands(folder)),
            *(str(folder / "data.py"), json.dumps(UNUSUAL_CONFIG), "patient"),
        ],
        "no block": ["--ranks", "4", *on_example(folder, "no_block", {**LAYERED, "ds_lgamp": {"enabled": False}})],
        "too many": ["--ranks", "4", *on_example(folder, "too_many", {**LAYERED, "ds_lgamp": {"chunks_per_rank": 9}})],
        "typo": ["--ranks", "4", *on_example(folder, "typo", {**LAYERED, "ds_lgamp": {"resident_chunk": 2}})],
        "no offer": [
            "--ranks",
            "4",
            *on_example(folder, "no_offer", {**LAYERED, "ds_lgamp": {"recompute": "selective"}}),
        ],
        "empty": [str(folder / "empty.py")],
        "too few ranks": ["--ranks", "3", *on_example(folder, "too_few", LAYERED)],
    }
    return {name: run_module([*EXPLAIN, *words], folder, TWO_RANKS) for name, words in runs.items()}


@pytest.mark.slow
def test_the_command_explains_by_itself(explained, tmp_path):
    words = [sys.executable, "-m", *EXPLAIN, "--ranks", "4", "--json", *on_example(tmp_path, "json", LAYERED)]
    environment = {**os.environ, **TWO_RANKS, "PYTHONPATH": str(ROOT)}
    written = subprocess.check_output(words, text=True, env=environment, cwd=tmp_path, timeout=HANGS_AFTER)
    assert json.loads(written) == facts_of(explained["json"])


def on_example(folder, name, config):
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return [str(SCRIPT), "--deepspeed_config", str(path)]


def on_islands(folder):
    """Writes a cluster file of two islands, one twice as fast as the other, with two GPUs each."""
    network = {"nodes": 1, "gpus_per_node": 2, "network": "roce", "bandwidth": "10 GB/s", "latency": "2 us"}
    islands = [{"name": "fast", "speed": 2.0, **network}, {"name": "slow", "speed": 1.0, **network}]
    path = folder / "islands.json"
    between = {"bandwidth": "1 GB/s", "latency": "50 us"}
    path.write_text(json.dumps({"islands": islands, "between": between, "peak": "1 TFLOP/s"}))
    return str(path)


def facts_of(ended):
    assert ended.status == 0, ended.complaints
    return json.loads(ended.output)


class Counted(Exception):
    """Ends a script after its second step was counted."""


def train_for_real(config):
    """Returns per rank what the engine of the example holds, and what its second step communicates."""
    import deepspeed

    import ds_lgamp
    import testing.scripts.public_example as example
    from ds_lgamp.integrations.deepspeed.engine.pipeline_engine import LgampEngine

    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    ds_lgamp.install()
    train_batch = LgampEngine.train_batch
    facts = {}

    def counting(engine, *arguments, **options):
        if engine.global_steps == 0:
            return train_batch(engine, *arguments, **options)
        with CollectiveCounter() as counter:
            train_batch(engine, *arguments, **options)
        facts.update(facts_of_engine(engine, counter))
        raise Counted

    LgampEngine.train_batch = counting
    initialize = deepspeed.initialize
    deepspeed.initialize = lambda args, **options: initialize(config=config, **options)
    sys.argv = ["public_example.py"]
    with pytest.raises(Counted):
        example.main()
    return facts


def facts_of_engine(engine, counter):
    partition, layout = engine.optimizer.partition, engine.module.layout
    chunks = {}
    for chunk, units in partition.chunk_units.items():
        shapes = [shape for unit in units if not unit.tied for _, shape, _ in unit.storage.contents()]
        chunks[chunk] = [layout.layers(chunk)[0], layout.layers(chunk)[-1], sum(map(math.prod, shapes))]
    state = engine.optimizer.optimizer.state.values()
    return {
        "rank": engine.stage_id,
        "chunks": chunks,
        "calls": dict(counter.calls),
        "bytes": dict(counter.bytes_sent),
        "weights": sum(unit.storage.shard.untyped_storage().nbytes() for unit in partition.units),
        "momentum": sum(tensor.nbytes for values in state for tensor in values.values()),
        "bubble_ranks": engine.num_stages,
    }


def test_every_number_is_the_engines(explained):
    facts = facts_of(explained["json"])
    real = run_on_ranks(4, train_for_real, LAYERED)
    assert (facts["pipeline_ranks"], facts["data_ranks"], facts["chunks"], facts["micro_batches"]) == (2, 2, 6, 4)
    assert facts["parameters"] == 13 * 8 + 6 * (8 + 8 + 64 + 8) + 16, "the tied embedding counts once"
    for rank in (0, 1):
        shown, engine = facts["ranks"][rank], real[2 * rank]
        assert engine["rank"] == rank
        chunks = {
            str(chunk["chunk"]): [chunk["first_layer"], chunk["last_layer"], chunk["parameters"]]
            for chunk in shown["chunks"]
        }
        assert chunks == {str(chunk): entry for chunk, entry in engine["chunks"].items()}
        moved, calls = shown["traffic"], Counter(engine["calls"])
        assert moved["gathers"] + moved["tied_gathers"] + shown["tied_sums"] == calls["all_gather"]
        assert moved["reduces"] + moved["tied_reduces"] == calls["all_to_all"], "gloo has no reduce-scatter"
        assert moved["sends"] == calls["send"] and moved["receives"] == calls["receive"]
        assert shown["collective_bytes_sent"] == engine["bytes"]["all_gather"] + engine["bytes"]["all_to_all"]
        assert shown["memory"]["weights"] == engine["weights"]
        assert shown["memory"]["optimizer_state"] == engine["momentum"]


def test_the_example_is_explained(explained):
    facts = facts_of(explained["json"])
    assert (facts["schedule"], facts["placement"], facts["zero_stage"]) == ("layered", "modular", 3)
    assert facts["bubble"] == pytest.approx(1 / 12) and facts["bubble_formula"] == pytest.approx(1 / 12)
    first = facts["ranks"][0]
    assert [chunk["chunk"] for chunk in first["chunks"]] == [0, 2, 4]
    assert first["chunks"][0]["layer_types"] == ["EmbeddingPipe", "BlockPipe"]
    assert first["tied"][0]["pipeline_ranks"] == [0, 1] and first["tied"][0]["parameters"] == 13 * 8
    # Three chunks, two resident: 2 * 3 - 2 gathers, instead of one per chunk, pass and micro-batch.
    assert [rank["traffic"]["gathers"] for rank in facts["ranks"]] == [4, 4]
    assert [rank["traffic"]["reduces"] for rank in facts["ranks"]] == [3, 3]
    assert facts["micro_batch_outer_gathers"] == 2 * 3 * 4
    assert [rank["memory"]["stored_activations"] for rank in facts["ranks"]] == [11, 9]


def test_on_a_cluster_layers_are_shared_by_the_speeds_of_its_islands(explained):
    """The 6 blocks are 2 and 1 in each round. Chunks take equally long, so the bubble is that of equal ranks."""
    facts = facts_of(explained["cluster"])
    assert facts["assignment"]["pipeline_speeds"] == facts["pipeline_rank_speeds"] == [2, 1]
    chunks = [[chunk["layer_types"].count("BlockPipe") for chunk in rank["chunks"]] for rank in facts["ranks"]]
    assert chunks == [[2, 2], [1, 1]]
    assert facts["bubble"] == facts["bubble_formula"] == pytest.approx(1 / 8)
    assert facts["data_rank_speeds"] is None and facts["micro_batch_shares"] == [4, 4]


def test_the_clock_has_the_shares_that_the_table_shows(explained, tmp_path):
    facts = facts_of(explained["cluster"])
    shown = facts["assignment"]
    again = laid_out_on(on_islands(tmp_path), {**facts, "order": shown["order"]})
    for name in ("network_seconds", "step_seconds", "exposed_seconds"):
        assert shown[name] == pytest.approx(getattr(again, name)), name


def test_on_a_cluster_shards_of_nodes_send_between_islands_what_peers_exchange(explained):
    facts = facts_of(explained["nodes"])
    assert facts["hierarchy"] == {"node_ranks": 2, "replicated": False}
    (rank,), sent = facts["ranks"], facts["assignment"]["bytes_sent"]
    assert sent["between"] == 4 * rank["bytes_between_nodes"] > 0 == sent["island"]
    assert sent["node"] == 4 * (rank["collective_bytes_sent"] - rank["bytes_between_nodes"])


def test_what_the_host_holds_and_what_the_bus_carries_is_told(explained):
    """Three chunks on each rank and two resident: 4 loads, of parts as large as those that gathers send."""
    facts, in_memory = facts_of(explained["host"]), facts_of(explained["json"])
    assert facts["offload"] == {"parameters": True, "on_device": [], "alone": False} and in_memory["offload"] is None
    for rank, plain in zip(facts["ranks"], in_memory["ranks"]):
        assert (rank["memory"]["weights"], rank["memory"]["optimizer_state"]) == (0, 0)
        host = rank["memory"]["host"]
        assert host["optimizer_state"] == plain["memory"]["optimizer_state"]
        assert host["master_weights"] == host["gradients"] == rank["bus_bytes_stored"] == plain["memory"]["weights"]
        assert rank["traffic"] == plain["traffic"] and rank["memory"]["peak"] < plain["memory"]["peak"]
        # With two data-parallel ranks a gather sends one part, as it was loaded. A reduction does so in bf16. The sum
        # of the tied embedding sends one of 64 elements.
        tied = rank["tied_sums"] * 4 * 64
        assert rank["collective_bytes_sent"] == rank["bus_bytes_loaded"] + rank["bus_bytes_stored"] // 2 + tied


def test_live_states_hold_masters_and_optimizer_state_and_no_folder_is_made(explained, tmp_path_factory):
    for rank, plain in zip(facts_of(explained["host"])["ranks"], facts_of(explained["json"])["ranks"]):
        host = rank["memory"]["host"]
        written = host["master_weights"] + host["optimizer_state"]
        assert list(rank["live"].values()) == [2 * written, written]
        assert plain["live"] is None
    assert not any(tmp_path_factory.getbasetemp().glob("explain*/live"))


def test_a_cluster_file_shows_who_is_which_rank_and_what_links_carry(explained):
    ended = explained["order"]
    assert ended.status == 0, ended.complaints
    text = ended.output[ended.output.index("Ranks on cluster") :]
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "fast fast-0 roce 2 0-1 0 0-1" in lines and "slow slow-0 roce 1 2-3 1 0-1" in lines
    assert "0 2 inside nodes between islands" in lines
    assert any(line.startswith("between islands ") for line in lines)
    assert re.search(r"On the clock, a step takes \S+ s if compute takes no time.", text)
    assert re.search(r"With compute it takes \S+ s, of which \S+ s of the network are exposed.", text)
    assert "as the launcher numbers them" in text


def test_without_a_pipeline_micro_batches_are(explained):
    ended = explained["shares"]
    assert ended.status == 0, ended.complaints
    words = (
        "micro-batches by the speeds of data-parallel ranks, 2, 2, 1, 1: 5, 5, 3, 3; what follows is for a rank with 5"
    )
    assert words in ended.output.splitlines()
    assert "= 2*6*5 = 60 times per step and rank, not 10." in ended.output


def test_text_is_for_people_and_nothing_but_the_explanation(explained):
    ended = explained["text"]
    assert ended.status == 0, ended.complaints
    lines = ended.output.splitlines()
    assert lines[0].startswith("1 pipeline x 2 data-parallel ranks, schedule layered, placement modular, ZeRO stage 3")
    assert "BlockPipe, LayerNorm, EmbeddingPipe" in ended.output
    assert "2*N*M = 2*6*4 = 48 times per step and rank, not 10." in ended.output
    assert "bytes are unknown" in ended.output and "stage=0" not in ended.output


def test_scripts_that_use_the_process_group_and_layers_that_need_data_are_explained(explained):
    """Four layers of 20, 0, 20 and 10 parameters, one chunk each, on two pipeline ranks and one data-parallel rank.

    The second rank builds the third layer, which needs data.
    """
    facts = facts_of(explained["unusual"])
    assert facts["precision"] == "bf16" and facts["optimizer"] == "AdamW" and facts["parameters"] == 50
    assert facts["micro_batch_group"] == 2 and facts["bubble_formula"] is None
    assert [[chunk["parameters"] for chunk in rank["chunks"]] for rank in facts["ranks"]] == [[20, 20], [0, 10]]
    first = facts["ranks"][0]
    assert first["traffic"] | {"sends": 0, "receives": 0} == dict.fromkeys(first["traffic"], 0)
    assert first["collective_bytes_sent"] == 0
    memory = first["memory"]
    # 16 and 4 parameters per layer, which begin at multiples of 32.
    stored = 2 * 2 * 32
    assert (memory["weights"], memory["master_weights"]) == (stored * 2, stored * 4)
    assert (memory["optimizer_state"], memory["gradients"], memory["gradient_buffers"]) == (stored * 8, stored * 4, 0)


def test_with_training_data_the_peak_has_activations(explained):
    """bf16, and 4 micro-batches of 2 samples of 32 numbers with a label, of which 2 are under way."""
    facts = facts_of(explained["data"])
    assert facts["activations_unknown"] is None
    first, last = (rank["memory"]["activations"] for rank in facts["ranks"])
    assert first["batch"] == last["batch"] == 4 * (2 * 32 * 2 + 2 * 8)
    result = 2 * 32 * 2
    # Chunk 2 stores inputs of two micro-batches. The inputs of chunk 0 belong to the batch.
    assert first["inputs"] == 2 * result and first["handed_over"] == 0
    assert min(first[kind] for kind in ("receives", "sends", "working")) >= result
    words = explained["data in words"].output
    assert "Memory of activations, each rank" in words and "The peak includes their bytes." in words
    # Messages of 64 elements are too small to be rounded. Rank 0 sends 8 of them to the next rank, rank 1 sends 4.
    title, *rows = words.partition("Each step, each rank\n")[2].splitlines()[:3]
    assert title.endswith("results in fp8")
    assert [row.endswith(sent) for row, sent in zip(rows, ("  1.02 kB", "  512 B"), strict=True)] == [True, True]


def test_within_a_budget_the_explanation_says_what_each_rank_recomputes(explained):
    facts, full = facts_of(explained["budget"]), facts_of(explained["data"])
    assert (facts["recompute"], facts["recompute_memory"]) == ("auto", "50 kB")
    again = [rank["recomputed"] for rank in facts["ranks"]]
    assert all(few < all_of_them for few, all_of_them in zip(again, (rank["recomputed"] for rank in full["ranks"])))
    assert all(rank["memory"]["peak"] <= 50_000 for rank in facts["ranks"])
    words = explained["budget in words"].output
    assert f"recompute auto within 50 kB (forwards by rank: {again[0]} of 8, {again[1]} of 8), optimizer" in words
    later = explained["budget later"].output
    assert "recompute auto within 50 kB (here as in the first batch, which recomputes all and measures)" in later


def test_a_model_of_transformers_is_explained_as_a_pipeline_of_its_layers(explained):
    shown, by_hand = (facts_of(explained[name]) for name in ("model", "by hand"))
    assert shown.pop("activations_unknown").startswith("the script gives micro-batches to the engine only after")
    del by_hand["activations_unknown"]
    for facts in (shown, by_hand):
        for rank in facts["ranks"]:
            for chunk in rank["chunks"]:
                chunk["layer_types"] = len(chunk["layer_types"])
    assert shown == by_hand
    assert (shown["pipeline_ranks"], shown["data_ranks"], shown["chunks"], shown["micro_batches"]) == (2, 2, 4, 8)


def test_the_model_inside_another_is_explained_with_all_its_outputs(explained):
    assert "8 micro-batches forward call by call, 2 in each" in explained["inside"].output


def test_an_optimizer_that_comes_later_is_all_that_is_unknown(explained):
    late, named = facts_of(explained["late"]), facts_of(explained["data"])
    assert (late.pop("optimizer"), named.pop("optimizer")) == ("given later", "AdamW")
    for rank in late["ranks"]:
        assert rank["memory"]["optimizer_state"] is None and rank["memory"]["weights"] > 0
    for rank in (*late["ranks"], *named["ranks"]):
        for unknown in ("optimizer_state", "update", "peak"):
            rank["memory"].pop(unknown)
    assert late == named
    words = explained["late in words"].output
    assert "optimizer given later" in words and "The optimizer's state is unknown and left out of the peak." in words
    assert "deepspeed.initialize got no optimizer: it is taken to come by engine._configure_optimizer, for all" in words


def test_what_travels_for_the_balance_of_experts_is_told(explained):
    """For 8 experts, test_routers.py measures the same."""
    sentence = (
        "Every message of hidden states takes 68 B more along for the loss that balances experts, and every message"
    )
    assert f"{sentence} of gradients 32 B." in explained["experts"].output
    assert "experts" not in explained["inside"].output


def test_bytes_of_activations_are_those_without_compilation(explained):
    words = explained["late in words"].output
    assert "recompute full, compiled, optimizer" in words
    assert "Bytes of activations are those without ds_lgamp.compile" in words
    assert "compil" not in explained["text"].output


def test_without_activations_the_explanation_says_why(explained):
    assert "unknown, because deepspeed.initialize got no training_data." in explained["text"].output
    assert facts_of(explained["json"])["ranks"][0]["memory"]["activations"] is None
    picky = explained["picky"]
    assert picky.status == 0, picky.complaints
    assert "unknown, because a layer does not work on tensors without values (" in picky.output


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no block", 'there is no enabled ds_lgamp block, stock DeepSpeed would run; add "ds_lgamp": {}'),
        ("too many", "ds_lgamp.chunks_per_rank is 9: 2 pipeline ranks would need 18 layers, the model has 9"),
        ("typo", "ds_lgamp.resident_chunk is no known key; did you mean resident_chunks?"),
        ("no offer", "ds_lgamp.recompute is 'selective', but no layer of the model offers it"),
        ("no budget", "recompute is 'auto', but a CPU has no memory of its own to fill; set ds_lgamp.recompute_memory"),
        (
            "shared",
            "ds_lgamp.recompute is 'auto', but ranks share a SyncBatchNorm and must recompute alike; use 'full'",
        ),
        ("small budget", "ds_lgamp.recompute is 'auto', which may take 9 kB of memory, but rank 0 needs"),
        ("empty", "empty.py ended without initialising an engine with a ds_lgamp block: nothing to explain"),
    ],
)
def test_where_nothing_can_be_explained_a_sentence_says_so(explained, name, sentence):
    ended = explained[name]
    assert ended.status == 2 and ended.output == ""
    (line,) = (line for line in ended.complaints.splitlines() if line.startswith("ds_lgamp: "))
    assert sentence in line and "Traceback" not in ended.complaints


def test_a_script_that_fails_says_how_many_ranks_were_imagined(explained):
    ended = explained["too few ranks"]
    hint, sentence = ended.complaints.splitlines()[-2:]
    assert ended.status == 2 and "num_stages (2) must divide distributed world size (3)" in sentence
    assert "it ran on 3 imagined ranks (--ranks)" in hint


@pytest.mark.parametrize("words", [["--json", "x.py"], ["--ranks", "2", "x.py"], ["--explain", "--ranks", "0", "x.py"]])
def test_options_that_make_no_sense_are_refused(words, capsys):
    from ds_lgamp.cli.main import main

    with pytest.raises(SystemExit) as status:
        main(["run", *words])
    assert status.value.code == 2 and "--ranks" in capsys.readouterr().err
