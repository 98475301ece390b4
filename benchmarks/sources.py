"""Recalculates what the sources of the method and of its peers say: ``python -m benchmarks run sources``.

Every number is the planner's (``ds_lgamp/planner``), with the constants that were fitted to other runs
(``python -m benchmarks run planner_fit``). What a source does not say is an assumption, which the code names.
"""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.record import Record, begin
from ds_lgamp.planner.cluster import named_cluster
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.hardware import forward_flops
from ds_lgamp.planner.memory import memory
from ds_lgamp.planner.models import read_model
from ds_lgamp.planner.predict import bandwidth_needed, predict
from ds_lgamp.planner.shortest import LAWS, critical_batch, shortest

NAME = "sources"
PAPER, MEGATRON = "arXiv 2106.02679", "arXiv 2104.04473"
SAID, PLANNED = "source", "planner"
CLOSE = ("3D parallelism", "trillion parameters", "days for")
"""Words of the claims that the planner should meet within a tenth."""
STEPS = 1e5
"""Steps of a training at the critical batch; only ratios of days depend on nothing else."""
UNFUSED = {"fused_attention": False, "overlaps": False}
"""Megatron-LM in 2021: no FlashAttention, and reductions behind the backward."""


def run() -> Record:
    """Calculates all of it."""
    record = begin(NAME)
    for source, what, said, planned, unit in [*shortest_training(), *needs_of_a_trillion(), *megatron(), *zero_3()]:
        config = {"what": what}
        if said is not None:
            record.add(source, config, SAID, [said], unit)
        record.add(source, config, PLANNED, [planned], unit)
        if said is not None and what.endswith("1f1b / layered") and "interleaved" not in what:
            record.aim(f"distance of {what} from {said:g}", abs(planned - said), 0.3)
        elif said is not None and any(word in what for word in CLOSE):
            record.aim(f"relative error of {what}", abs(planned / said - 1), 0.1)
    return record


Line = tuple[str, str, float | None, float, str]
"""A source, what it says, the number it says if it says one, the planner's number, and the unit."""


def shortest_training() -> Iterator[Line]:
    """A trillion parameters (X_160) on nodes of 16 A100, a network card for each GPU."""
    model = read_model("x160")
    cluster = replace(named_cluster("a100"), gpus_per_node=16, cards_per_node=16)
    for law in LAWS:
        tokens = STEPS * critical_batch(model, law) * model.sequence_length / 2
        found = shortest(model, cluster, tokens, law)
        for method, entry in found.items():
            gpus = entry.plan.configuration.gpus
            yield PAPER, f"shortest training of X_160, law {law}, {method}, {gpus:,} GPUs", None, entry.days, "days"
        for method, said in (("1f1b", 2.0), ("interleaved_1f1b", None)):
            factor = found[method].days / found["layered"].days
            yield PAPER, f"shortest training of X_160, law {law}, {method} / layered", said, factor, "ratio"


def needs_of_a_trillion() -> Iterator[Line]:
    """Network and memory of X_160 in two configurations at about the same number of GPUs: a stock pipeline, and the
    layered order with ZeRO-3. These configurations are this project's reconstruction."""
    model = read_model("x160")
    layouts = {
        "1f1b, W14 P160 T16 M172": Configuration(14, 160, 16, 1, 172, zero_stage=0),
        "layered ZeRO-3, W483 P5 T16 M5": Configuration(
            483, 5, 16, 1, 5, zero_stage=3, schedule="layered", chunks_per_rank=32
        ),
    }
    for name, configuration in layouts.items():
        nodes = -(-configuration.gpus // 16)
        cluster = replace(named_cluster("a100"), nodes=nodes, gpus_per_node=16, cards_per_node=16)
        found = predict(model, cluster, configuration)
        yield PAPER, f"step of {name}", None, found.seconds, "s"
        needed = bandwidth_needed(model, cluster, configuration)
        if needed is not None:
            yield PAPER, f"network of {name} that loses 5 %", None, needed * 8 / 1e9, "Gbit/s per GPU"
        share = memory(model, configuration).total / cluster.memory
        yield PAPER, f"memory of {name}", None, share, "of an A100's 80 GB"


def achieved(name: str, configuration: Configuration, gpus: int) -> float:
    """Returns the FLOP/s of a GPU, counting recomputation, as arXiv 2104.04473 does."""
    model = read_model(name)
    seconds = predict(model, named_cluster("a100", gpus), configuration).seconds
    return 4 * forward_flops(model, configuration.sequences * model.sequence_length) / seconds / configuration.gpus


def megatron() -> Iterator[Line]:
    """Rows of Megatron-LM. The chunks per rank are an assumption: two with interleaving."""
    trillion = Configuration(6, 64, 8, 1, 512, schedule="interleaved_1f1b", chunks_per_rank=2, **UNFUSED)
    reached = achieved("megatron-1t", trillion, 3072)
    yield MEGATRON, "one trillion parameters on 3072 GPUs", 502.0, reached * 3072 / 1e15, "PFLOP/s"
    model = read_model("megatron-1t")
    yield MEGATRON, "days for 450 billion tokens of it", 84.0, days(model.parameters, 450e9, 3072, reached), "days"
    gpt3 = Configuration(16, 8, 8, 1, 96, schedule="interleaved_1f1b", chunks_per_rank=2, **UNFUSED)
    model = read_model("gpt3-175b")
    reached = achieved("gpt3-175b", gpt3, 1024)
    found = days(model.parameters, 300e9, 1024, reached)
    yield MEGATRON, "days for 300 billion tokens of 175 billion parameters on 1024 GPUs", 34.0, found, "days"
    plain = Configuration(1, 12, 8, 1, 12, **UNFUSED)
    several = replace(plain, schedule="interleaved_1f1b", chunks_per_rank=2)
    gain = max(
        achieved("gpt3-175b", replace(several, micro_batches=count), 96)
        / achieved("gpt3-175b", replace(plain, micro_batches=count), 96)
        for count in (24, 36, 48, 60)
    )
    yield MEGATRON, "gain of interleaving, 175 billion parameters on 96 GPUs, at most", 1.10, gain, "ratio"


def zero_3() -> Iterator[Line]:
    """ZeRO-3 alone against three-dimensional parallelism. Micro-batches and layouts are assumptions."""
    rows = (
        ("gpt3-175b", 384, 144, 153, Configuration(384, 1, 1, 4, 1), Configuration(4, 12, 8, 1, 384)),
        ("gpt3-175b", 1536, 44, 141, Configuration(1536, 1, 1, 1, 1), Configuration(16, 12, 8, 1, 96)),
        ("gpt-530b", 640, 138, None, Configuration(640, 1, 1, 4, 1), None),
        ("gpt-530b", 560, None, 171, None, Configuration(2, 35, 8, 1, 1120)),
    )
    for name, gpus, zero, three, stock, pipeline in rows:
        if stock is not None:
            stock = replace(stock, zero_stage=3, micro_batch_outer=True, **UNFUSED)
            yield (
                MEGATRON,
                f"{name} on {gpus} GPUs, ZeRO-3",
                zero,
                achieved(name, stock, gpus) / 1e12,
                "TFLOP/s per GPU",
            )
        if pipeline is not None:
            pipeline = replace(pipeline, **UNFUSED)
            found = achieved(name, pipeline, gpus) / 1e12
            yield MEGATRON, f"{name} on {gpus} GPUs, 3D parallelism", three, found, "TFLOP/s per GPU"


def days(parameters: int, tokens: float, gpus: int, flops: float) -> float:
    """Returns 8 tokens parameters / (GPUs FLOP/s) in days, the formula of arXiv 2104.04473, section 5.1."""
    return 8 * tokens * parameters / (gpus * flops) / 86400
