"""Predicts what pretraining BERT-large takes on 32 nodes of 8 T4 behind 10 Gbit/s: ``python -m benchmarks run
bert_plan``.

All numbers are the planner's (``ds_lgamp/planner``), whose constants were fitted to A100. Nothing ran on a T4. Rates
are those of NVIDIA's data sheet; that of PCIe, latencies, the price, the batches and the number of sequences are
assumptions.
"""

from benchmarks.record import OURS, Config, Record, begin
from ds_lgamp.planner.cluster import Cluster, parse_cluster
from ds_lgamp.planner.search import Plan, search
from ds_lgamp.planner.transformers_config import model_of_config

NAME = "bert_plan"
LARGE = {
    "model_type": "bert",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "vocab_size": 30528,
}
CLUSTER = {
    "name": "32 nodes of 8 T4",
    "nodes": 32,
    "gpus_per_node": 8,
    "peak": "65 TFLOP/s",
    "memory": "16 GB",
    "memory_bandwidth": "320 GB/s",
    "inside": {"bandwidth": "16 GB/s", "latency": "10 us"},
    "between": {"bandwidth": "10 Gbit/s", "latency": "30 us", "cards_per_node": 1},
    "price": "0.35 USD/h",
}
PHASES = {128: (65536, 230.4e6), 512: (32768, 25.6e6)}
"""By sequence length: sequences of a step, and of the whole phase. Together 256 million, nine tenths of them short."""
METHODS = {"layered": OURS, "1f1b": "stock, ZeRO-0 or 1", "ZeRO-2": "stock, ZeRO-2"}
"""Contenders by the planner's name of the method, without pipelines."""
DAY = 86400


def run() -> Record:
    """Predicts the best configuration of every method in every phase."""
    record, cluster = begin(NAME), parse_cluster(CLUSTER)
    seconds: dict[str, float] = {}
    for length, (batch, sequences) in PHASES.items():
        best = plans(cluster, length, batch)
        for contender, plan in best.items():
            enter(record, contender, length, plan, sequences / batch)
            seconds[contender] = seconds.get(contender, 0.0) + sequences / batch * plan.prediction.seconds
        peer = min(plan.prediction.seconds for name, plan in best.items() if name != OURS)
        record.aim(f"predicted step / best peer's, sequence {length}", best[OURS].prediction.seconds / peer, 1.0)
    for contender, spent in seconds.items():
        record.add(contender, {"sequence": "both"}, "days", [spent / DAY], "days")
    return record


def plans(cluster: Cluster, length: int, batch: int) -> dict[str, Plan]:
    """Returns the best plan of every method of ``METHODS``."""
    found = search(model_of_config(NAME, LARGE, length), cluster, batch)
    alone = [plan for plan in found if plan.configuration.pipeline_ranks * plan.configuration.tensor_ranks == 1]
    return {METHODS[plan.method]: plan for plan in reversed(alone) if plan.method in METHODS}


def enter(record: Record, contender: str, length: int, plan: Plan, steps: float) -> None:
    """Enters the rows of one plan."""
    of, told, parts = plan.configuration, plan.prediction, plan.prediction.parts
    group = f" by {of.group}" if of.group < of.micro_batches else ""
    config: Config = {
        "sequence": length,
        "micro_batches": f"{of.micro_batches} x {of.micro_batch}{group}",
        "zero_stage": of.zero_stage,
        "recompute": of.recompute,
    }
    network = parts["data_parallel"] + parts["gathers"]
    record.add(contender, config, "step", [told.seconds], "s")
    record.add(contender, config, "network", [network / told.seconds], "ratio")
    record.add(contender, config, "memory", [plan.memory.total / 1e9], "GB")
    record.add(contender, config, "days", [steps * told.seconds / DAY], "days")
    assert plan.dollars is not None
    record.add(contender, config, "cost", [steps * plan.dollars], "dollars")
