"""Reads given configurations from a table, one per row, and predicts each."""

import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ds_lgamp.planner.cluster import CLUSTERS, Cluster, read_cluster, sized
from ds_lgamp.planner.configuration import PLANNED, RECOMPUTE, Configuration
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.models import VOCABULARY
from ds_lgamp.planner.predict import Prediction, predict

NEEDED = (
    "gpus",
    "global_batch",
    "micro_batch",
    "hidden_size",
    "attention_heads",
    "layers",
    "sequence_length",
    "tensor_parallel",
    "data_parallel",
    "pipeline_parallel",
)
"""Columns that every table has: whole numbers. ``global_batch`` and ``micro_batch`` count sequences."""
OPTIONAL = (
    "iteration_ms",
    "vocabulary_size",
    "feed_forward_size",
    "zero_stage",
    "schedule",
    "chunks_per_rank",
    "resident_chunks",
    "recompute",
    "fused_attention",
    "overlaps",
    "micro_batch_outer",
    "overlap_update",
)
"""Columns with a default: ``iteration_ms`` is the measured time of a step in milliseconds; the others are fields of the
model and of the configuration. The defaults are those of Megatron-LM in the published tables: full recomputation,
attention that stores its scores, collectives that do not overlap compute."""
ALIASES = {"virtual_stages": "chunks_per_rank"}
"""Megatron-LM's words for columns."""
IGNORED = ("parameters_billion",)
"""Columns that repeat what others say."""


@dataclass(frozen=True)
class Run:
    """A row of the table."""

    model: Model
    configuration: Configuration
    measured: float | None
    """Seconds of a step, if the table tells."""

    def predict(self, cluster: Cluster) -> Prediction:
        return predict(self.model, cluster, self.configuration)


def read_runs(lines: Iterable[str]) -> tuple[list[Run], list[str]]:
    """Reads a table of comma-separated values. Returns its rows, and the columns that mean nothing here.

    Raises ValueError that names the row, counted from 1 without the head, and the field.
    """
    reader = csv.DictReader(lines)
    columns = [ALIASES.get(column.strip(), column.strip()) for column in reader.fieldnames or []]
    reader.fieldnames = columns
    missing = [column for column in NEEDED if column not in columns]
    if missing:
        raise ValueError(f"the table lacks the columns {', '.join(missing)}")
    runs = []
    for number, row in enumerate(reader, 1):
        try:
            runs.append(_run(row))
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from None
    if not runs:
        raise ValueError("the table has no rows")
    return runs, [column for column in columns if column not in (*NEEDED, *OPTIONAL, *IGNORED)]


def predict_all(runs: Iterable[Run], cluster_source: str) -> list[Prediction]:
    """Predicts every row on a cluster. Raises ValueError that names the first row that cannot run."""
    cluster = read_cluster(cluster_source)
    predictions = []
    for number, run in enumerate(runs, 1):
        # A ready cluster has as many nodes as a row needs.
        fitting = sized(cluster, run.configuration.gpus) if cluster_source in CLUSTERS else cluster
        try:
            predictions.append(run.predict(fitting))
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from None
    return predictions


def _run(row: Mapping[str | Any, str | Any]) -> Run:
    if None in row or None in row.values():
        raise ValueError("it has more or fewer fields than the head")
    fields = {column: text.strip() for column, text in row.items()}

    def count(column: str, default: int | None = None, least: int = 1) -> int:
        return _count(column, fields[column], least) if fields.get(column) or default is None else default

    def choice(column: str, allowed: Mapping[str, Any], default: Any) -> Any:
        text = fields.get(column, "").lower()
        if text and text not in allowed:
            raise ValueError(f"{column} is '{text}'; use {' or '.join(allowed)}")
        return allowed[text] if text else default

    tensor, data, pipeline = count("tensor_parallel"), count("data_parallel"), count("pipeline_parallel")
    if tensor * data * pipeline != count("gpus"):
        raise ValueError(
            f"gpus is {fields['gpus']}; tensor_parallel {tensor} x data_parallel {data} x pipeline_parallel {pipeline} "
            f"are {tensor * data * pipeline}"
        )
    heads = count("attention_heads")
    if heads % tensor:
        raise ValueError(f"attention_heads is {heads}; it must be a multiple of tensor_parallel, which is {tensor}")
    batch, per_round = count("global_batch"), count("micro_batch") * data
    if batch % per_round:
        raise ValueError(
            f"global_batch is {batch}; it must be a multiple of micro_batch x data_parallel, which is {per_round}"
        )
    chunks, stage = count("chunks_per_rank", 1), count("zero_stage", 0, least=0)
    schedule = choice("schedule", {name: name for name in PLANNED}, "1f1b" if chunks == 1 else "interleaved_1f1b")
    configuration = Configuration(
        data_ranks=data,
        pipeline_ranks=pipeline,
        tensor_ranks=tensor,
        micro_batch=count("micro_batch"),
        micro_batches=batch // per_round,
        zero_stage=stage,
        schedule=schedule,
        chunks_per_rank=chunks,
        resident_chunks=count("resident_chunks", 2),
        recompute=choice("recompute", {name: name for name in RECOMPUTE if name != "auto"}, "full"),
        micro_batch_outer=choice("micro_batch_outer", _TRUTHS, stage >= 2 and schedule != "layered"),
        fused_attention=choice("fused_attention", _TRUTHS, False),
        overlaps=choice("overlaps", _TRUTHS, False),
        overlap_update=choice("overlap_update", _TRUTHS, False),
    )
    # Refuses what the schedule cannot do.
    _ = configuration.spec
    return Run(_model(count), configuration, _measured(fields.get("iteration_ms", "")))


def _model(count: Callable[..., int]) -> Model:
    hidden = count("hidden_size")
    return Model.gpt(
        "gpt",
        count("layers"),
        hidden,
        count("attention_heads"),
        count("sequence_length"),
        count("vocabulary_size", VOCABULARY),
        count("feed_forward_size", 4 * hidden),
    )


_TRUTHS = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}


def _count(column: str, text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{column} is '{text}'; use a whole number from {least}")
    return int(text)


def _measured(text: str) -> float | None:
    if not text:
        return None
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = 0.0
    if not 0 < milliseconds < float("inf"):
        raise ValueError(f"iteration_ms is '{text}'; use milliseconds above 0")
    return milliseconds / 1e3
