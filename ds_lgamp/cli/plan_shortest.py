"""``ds_lgamp plan --model ... --law ...``: the shortest training by method."""

import json
from typing import TextIO

from ds_lgamp.cli.progress import at_work
from ds_lgamp.planner.cluster import Cluster
from ds_lgamp.planner.configuration import describe
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.shortest import BUSY, critical_batch, shortest


def run_shortest(model: Model, cluster: Cluster, tokens: float, law: str, as_json: bool, output: TextIO) -> int:
    """Prints the shortest training of each method. Returns the exit status. Raises ValueError if none is possible."""
    with at_work("looking for the shortest training"):
        found = shortest(model, cluster, tokens, law)
    if not found:
        raise ValueError(f"{model.name} does not fit {cluster.name} with any layout at its critical batch")
    batch = critical_batch(model, law)
    if as_json:
        rows = {
            name: {"days": entry.days, "gpus": entry.plan.configuration.gpus, **entry.plan.configuration.to_json()}
            for name, entry in found.items()
        }
        json.dump({"critical_batch": batch, "methods": rows}, output)
        output.write("\n")
        return 0
    output.write(
        f"{model.name}, {model.parameters / 1e9:.4g} billion parameters, {tokens:g} tokens: critical batch {batch} "
        f"sequences ({law}); at least {BUSY:.0%} of all GPUs' time is compute.\n"
    )
    for entry in sorted(found.values(), key=lambda entry: entry.days):
        of = entry.plan.configuration
        output.write(f"{entry.days:8.3g} days on {of.gpus:,} GPUs: {describe(of)}\n")
    return 0
