"""Compares the two runs of launch/quickstart.sh: ``python -m benchmarks.quickstart runs/quickstart``.

Reads stock.json and lgamp.json, which ``ds_lgamp run --measure`` wrote, and the recording in trace. Writes
summary.json, losses.png and the page index.html to the same folder.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.quickstart_page import quickstart_page
from ds_lgamp.view.recording import RecordingError, read_recording

CONTENDERS = ("stock", "lgamp")


def summarise(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns both runs and the largest difference of their losses at any step. Raises SystemExit if they have
    different numbers of steps."""
    losses = [runs[name]["losses"] for name in CONTENDERS]
    if len(losses[0]) != len(losses[1]):
        raise SystemExit(f"the runs have {len(losses[0])} and {len(losses[1])} steps; run launch/quickstart.sh again")
    return {**runs, "max_loss_difference": max(abs(first - second) for first, second in zip(*losses))}


def quickstart_rows(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The rows of the quickstart's table: label, stock and ds_lgamp. The header comes first."""
    stock, lgamp = summary["stock"], summary["lgamp"]

    def row(label: str, key: str, form: str, scale: float = 1) -> tuple[str, str, str]:
        return label, format(stock[key] * scale, form), format(lgamp[key] * scale, form)

    return [
        ("", "stock", "ds_lgamp"),
        ("loss, first step", f"{stock['losses'][0]:.4f}", f"{lgamp['losses'][0]:.4f}"),
        ("loss, last step", f"{stock['losses'][-1]:.4f}", f"{lgamp['losses'][-1]:.4f}"),
        row("collectives per step and rank", "collectives_per_step", "d"),
        row("pipeline messages sent per step and rank", "messages_per_step", "d"),
        row("MB sent per step and rank", "bytes_per_step", ".2f", 1e-6),
        row("peak memory of tensors, MB", "peak_bytes", ".1f", 1e-6),
        row("pipeline bubble, simulated", "bubble", ".1%"),
        row("seconds per step", "step_seconds", ".2f"),
    ]


def plot_losses(summary: dict[str, Any], path: Path) -> None:
    """Draws both loss curves in one plot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, width in zip(CONTENDERS, (5, 1.5)):
        axes.plot(summary[name]["losses"], linewidth=width, label=name)
    axes.set(xlabel="step", ylabel="training loss", title=f"largest difference {summary['max_loss_difference']:.1e}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    summary = summarise({name: json.loads((folder / f"{name}.json").read_text()) for name in CONTENDERS})
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    plot_losses(summary, folder / "losses.png")
    for label, stock, lgamp in quickstart_rows(summary):
        print(f"{label:<44}{stock:>16}{lgamp:>16}")
    print(f"largest difference of the losses: {summary['max_loss_difference']:.1e}")
    print(f"written: {folder / 'summary.json'}, {folder / 'losses.png'}")
    try:
        page = quickstart_page(summary, quickstart_rows(summary), read_recording(folder / "trace"))
    except RecordingError as error:
        # A run that ends before the recorded steps has none.
        parser.exit(int(any((folder / "trace").glob("*.json*"))), f"no page: {error}\n")
    (folder / "index.html").write_text(page, encoding="utf-8")
    print(f"open in a browser: {(folder / 'index.html').resolve()}")


if __name__ == "__main__":
    main()
