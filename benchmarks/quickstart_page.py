"""The page of the quickstart's two runs: losses, the table, and where the time of a recorded step went."""

from collections.abc import Sequence
from html import escape
from typing import Any

from ds_lgamp.view.figures import show, simulated, simulated_1f1b
from ds_lgamp.view.pictures import html_page
from ds_lgamp.view.recording import Recording

WIDTH, HEIGHT, LEFT, BOTTOM = 560, 240, 44, 28
"""Pixels: of the picture of the losses, and of its margins for numbers."""
COLOURS = {"stock": "var(--faint)", "lgamp": "var(--accent)"}


def quickstart_page(summary: dict[str, Any], rows: Sequence[tuple[str, str, str]], recording: Recording) -> str:
    """The page as HTML.

    Args:
        summary: of both runs, as in summary.json.
        rows: of the table, the header first.
        recording: of steps with ds_lgamp. Stock DeepSpeed records none, so its schedule is simulated, and that of
            ds_lgamp beside it.
    """
    step = show(recording)
    panels = [
        ("1F1B, simulated", show(simulated_1f1b(step))),
        ("ds_lgamp, simulated", show(simulated(step))),
        (f"ds_lgamp, {step.title}", step),
    ]
    return html_page("Quickstart: stock DeepSpeed and ds_lgamp", panels, before=_runs(summary, rows))


def _runs(summary: dict[str, Any], rows: Sequence[tuple[str, str, str]]) -> str:
    losses = {name: summary[name]["losses"] for name in COLOURS}
    lines = [
        "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
        for tag, row in zip(["th", *["td"] * (len(rows) - 1)], rows)
    ]
    table = f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
    return (
        '<section aria-labelledby="runs"><h2 id="runs">Two runs of one script</h2>'
        '<div style="display: flex; flex-wrap: wrap; gap: 12px 48px; align-items: flex-start">'
        f"<div>{losses_picture(losses)}<p>Training loss over steps. Largest difference: "
        f"{summary['max_loss_difference']:.1e}.</p></div>{table}</div>"
        "<p>Below, what happens in one step. Stock DeepSpeed records none, so its schedule is simulated; so is that of "
        "ds_lgamp, with the same durations: the means of the measured step.</p></section>"
    )


def losses_picture(losses: dict[str, list[float]]) -> str:
    """Both curves as SVG. The first is drawn wide, so that one sees both where they agree."""
    everything = [loss for curve in losses.values() for loss in curve]
    low, high = min(everything), max(everything)
    steps = max(map(len, losses.values()))

    def place(step: int, loss: float) -> str:
        x = LEFT + (WIDTH - LEFT - 8) * step / max(steps - 1, 1)
        y = 8 + (HEIGHT - BOTTOM - 8) * (high - loss) / ((high - low) or 1)
        return f"{x:.1f},{y:.1f}"

    lines = []
    for name, width in zip(losses, (6, 2)):
        points = " ".join(place(step, loss) for step, loss in enumerate(losses[name]))
        lines.append(
            f'<polyline points="{points}" fill="none" stroke-width="{width}" stroke-linejoin="round"'
            f' style="stroke: {COLOURS[name]}" opacity="{0.45 if width > 2 else 1}"/>'
        )
    for loss in (low, high):
        y = place(0, loss).split(",")[1]
        lines.append(f'<text x="{LEFT - 8}" y="{float(y) + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
    for step in (0, steps - 1):
        x, anchor = place(step, low).split(",")[0], "start" if step == 0 else "end"
        lines.append(f'<text x="{x}" y="{HEIGHT - 6}" text-anchor="{anchor}">step {step + 1}</text>')
    for y, name, words in ((24, "stock", "stock DeepSpeed"), (42, "lgamp", "ds_lgamp")):
        colour = f'style="fill: {COLOURS[name]}"'
        lines.append(f'<text x="{WIDTH - 8}" y="{y}" text-anchor="end" {colour}>{words}</text>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img"'
        ' aria-label="Training losses of both runs" font-size="12" style="fill: var(--faint); max-width: 100%">'
        f"{''.join(lines)}</svg>"
    )
