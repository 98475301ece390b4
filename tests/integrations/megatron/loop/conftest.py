"""Tables of cases that share processes: a test file names its ``CASES``."""

import pytest

from tests.integrations.megatron.training_loop import outcomes_of
from tests.slow import chosen


@pytest.fixture(scope="module")
def outcomes(request):
    """The tracebacks of each case that runs: "" if it raised nothing."""
    return outcomes_of(request.module.CASES, chosen(request, "case"))
