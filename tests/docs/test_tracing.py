"""The dashboard and the code of docs/tracing.md show what the monitors get."""

import re
import sys
from types import SimpleNamespace

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

import ds_lgamp
from ds_lgamp.integrations.deepspeed.engine.monitor import StepReport
from ds_lgamp.runtime.clocks import COMPUTE, EXPOSED_WAITS
from testing import ROOT
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks

PAGE = (ROOT / "docs" / "tracing.md").read_text()
OF_TENSORBOARD, OF_MLFLOW = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
STOCKS = {"Train/Samples/train_loss", "Train/Samples/lr"}
"""The events of DeepSpeed's own."""


def names():
    engine = SimpleNamespace(get_global_grad_norm=lambda: 1.0, global_samples=1)
    report = StepReport(1.0, 1.0, dict.fromkeys((*COMPUTE, *EXPOSED_WAITS), 0.0), 0.5, 1.0)
    return {name for name, _, _ in report.events(engine)} | STOCKS


def test_every_chart_of_the_dashboard_has_values_and_every_value_a_chart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(OF_TENSORBOARD, {})
    events = EventAccumulator(str(tmp_path / "runs" / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    charts = [tag for category in layout.category for chart in category.chart for tag in chart.multiline.tag]
    shown = {tag: {name for name in names() if re.fullmatch(tag, name)} for tag in charts}
    assert all(shown.values())
    assert set.union(*shown.values()) == names() - {"Train/Samples/lr"}


def test_the_page_names_every_value():
    listed = set(re.findall(r"^\| `(Train/Samples/[^`]*)` \|", PAGE, re.MULTILINE))
    kinds = {name.replace("KIND", kind) for name in listed for kind in EXPOSED_WAITS}
    assert kinds == names() - STOCKS


def report_to_mlflow(folder):
    """Trains two steps. Returns what a stand-in for MLflow got on this rank, as (name, samples)."""
    prepare_rank()
    ds_lgamp.install()
    got = []
    log_metric = lambda name, value, step: got.append((name, step))  # noqa: E731
    sys.modules["mlflow"] = SimpleNamespace(log_metric=log_metric)
    with quiet():
        module = PipelineModule([LayerSpec(torch.nn.Linear, 4, 4)] * 2, num_stages=2, loss_fn=torch.nn.MSELoss())
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "csv"},
            "ds_lgamp": {"layers_per_chunk": 1},
        }
        engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
        if dist.get_rank() == 0:
            page = {}
            exec(OF_MLFLOW, page)
            page["report_to_mlflow"](engine)
        for _ in range(2):
            engine.train_batch(iter([(torch.ones(1, 4), torch.ones(1, 4))]))
    return got


def test_mlflow_gets_every_value_after_every_step(tmp_path):
    first, second = run_on_ranks(2, report_to_mlflow, str(tmp_path))
    assert len(list(tmp_path.rglob("*.csv"))) == len(names())
    assert sorted(first) == sorted((name, samples) for name in names() for samples in (1, 2))
    assert second == []
