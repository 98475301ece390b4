"""Ways in which models of one's own, and loops, differ from plain ones. Each fills slots of testing.fuzz.source."""

from testing.fuzz.ways.forwards import HYBRID, IN_PLACE, SHARED, VALUES
from testing.fuzz.ways.habits import BACKWARDS, CRITERIA, DRAWS, REACHED, TRAINING, WEIGHTS
from testing.fuzz.ways.loops import BETWEEN, CONTAINERS, SETTINGS, SHAPES
from testing.fuzz.ways.parts import ACTIVATIONS, HOOKS, OUTPUTS, PARAMETERS
from testing.fuzz.ways.state import BESIDE, LASTING, VIEWS

FAMILIES = (
    BESIDE, LASTING, VALUES, SHARED, HYBRID, IN_PLACE, PARAMETERS, ACTIVATIONS, HOOKS, OUTPUTS, CONTAINERS, SHAPES,
    SETTINGS, BETWEEN, DRAWS, TRAINING, REACHED, BACKWARDS, WEIGHTS, CRITERIA, VIEWS,
)  # fmt: skip
"""A training draws from families first, since some have many ways that are alike."""
WAYS: dict[str, dict[str, str]] = {name: slots for family in FAMILIES for name, slots in family.items()}
assert len(WAYS) == sum(map(len, FAMILIES)), "names are distinct"
