"""Plans training on one machine, for models that its cards cannot hold: ``python -m benchmarks run one_machine``.

Nothing is measured: every number is the planner's (``ds_lgamp/planner``), as ``ds_lgamp plan`` prints it.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from benchmarks.record import Record, begin
from ds_lgamp.planner.cluster import named_cluster, with_part
from ds_lgamp.planner.models import read_model
from ds_lgamp.planner.search import Allowed, NothingFits, search

NAME = "one_machine"
MODELS = ("llama-1b", "llama-3b", "llama-8b", "qwen-14b", "qwen-32b", "llama-70b")
SEQUENCES, LENGTH = 16, 4096
"""Of a step: sequences, and tokens of each."""


class Machine(NamedTuple):
    """Cards of a ready cluster, and the memory of their host in GB."""

    card: str
    cards: int
    host: int


class Training(NamedTuple):
    """What trains of a model."""

    name: str
    state: str = "fp32"
    """The optimizer's state, as a configuration has it."""
    adapters: int = 0
    """The rank of adapters beside frozen weights; 0 if everything trains."""


TRAININGS = (
    Training("all"),
    Training("all, state in bf16", "bf16"),
    Training("all, moments in 8 bits", "8bit"),
    Training("adapters of rank 16", adapters=16),
)
CARDS = (("rtx4090", 1), ("rtx4090", 2), ("a100", 1))
MACHINES = [Machine(card, cards, host) for card, cards in CARDS for host in (64, 128, 256)]


def run(machines: Sequence[Machine] = MACHINES, models: Sequence[str] = MODELS) -> Record:
    """Enters what the fastest plan takes, for every machine, training and model that it has room for."""
    record = begin(NAME)
    for machine, training in product(machines, TRAININGS):
        cluster = with_part(named_cluster(machine.card), machine.cards, f"{machine.host} GB")
        for name in models:
            model, config = read_model(name, LENGTH), {**machine._asdict(), "trains": training.name, "model": name}
            model = model.adapted(training.adapters) if training.adapters else model
            try:
                plan = search(model, cluster, SEQUENCES, best=1, allowed=Allowed(state=training.state))[0]
            except NothingFits:
                continue
            tokens = SEQUENCES * LENGTH / plan.prediction.seconds
            record.add(plan.method, config, "tokens", [tokens], "tokens/s")
            record.add(plan.method, config, "memory of a card", [plan.memory.total], "bytes")
            record.add(plan.method, config, "memory of the host", [plan.memory.host * machine.cards], "bytes")
    return record
