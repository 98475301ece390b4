"""What a holder of parameters must be able to do."""

import pytest

from ds_lgamp.integrations.megatron.loop.forward_backward import DistributedData
from ds_lgamp.runtime.batch import ParameterHolder

BETWEEN_NODES = ["refresh", "wait_refresh", "combine", "wait_combine"]
TO_THE_HOST = ["load", "wait_load", "store", "wait_store"]


@pytest.mark.parametrize("method", BETWEEN_NODES + TO_THE_HOST)
def test_an_action_that_a_holder_lacks_is_an_error(method):
    what = "hierarchical shards" if method in BETWEEN_NODES else "offloading"
    with pytest.raises(NotImplementedError, match=f"DistributedData cannot run a program with {what}"):
        getattr(DistributedData(), method)(0)


def test_a_partition_that_cannot_reduce_is_never_made():
    class Lacking(ParameterHolder):
        def gather(self, chunk):
            """Gathers."""

    with pytest.raises(TypeError, match="reduce"):
        Lacking()
