"""A checkpoint to forge, and a marker that an attack would leave."""

import pytest

from testing.checkpoints import written


@pytest.fixture
def marker(tmp_path):
    """Returns the path of a file that the attack would write. Checks at the end that it does not exist."""
    path = tmp_path / "marker"
    yield path
    assert not path.exists()


@pytest.fixture
def checkpoint(tmp_path):
    return written(tmp_path / "run" / "tag")
