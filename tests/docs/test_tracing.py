"""The dashboard of docs/tracing.md shows what the monitors get."""

import re
from types import SimpleNamespace

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from ds_lgamp.integrations.deepspeed.engine.monitor import StepReport
from ds_lgamp.runtime.stopwatch import COMPUTE, EXPOSED_WAITS
from testing import ROOT

PAGE = (ROOT / "docs" / "tracing.md").read_text()
STOCKS = {"Train/Samples/train_loss", "Train/Samples/lr"}
"""The events of DeepSpeed's own."""


def names():
    engine = SimpleNamespace(get_global_grad_norm=lambda: 1.0, global_samples=1)
    report = StepReport(1.0, 1.0, dict.fromkeys((*COMPUTE, *EXPOSED_WAITS), 0.0), 0.5, 1.0)
    return {name for name, _, _ in report.events(engine)} | STOCKS


def test_every_chart_of_the_dashboard_has_values_and_every_value_a_chart(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
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
