"""Values and bytes of tensors of any layout in memory."""

import pytest
import torch

from ds_lgamp.partition.memory import bytes_of, write
from ds_lgamp.runtime.layer_state import LayerState

VIEWS = {
    "scalar": torch.rand(()),
    "one of eight": torch.rand(8)[::8],
    "transposed": torch.rand(3, 4).t(),
    "expanded": torch.rand(3, 1).expand(3, 4),
    "empty": torch.rand(0, 3),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_bytes_are_those_of_the_elements_in_their_order(kind):
    own = VIEWS[kind]
    assert bytes_of(own).view(own.dtype).tolist() == own.flatten().tolist()


@pytest.mark.parametrize("kind", VIEWS)
def test_every_layout_takes_values(kind):
    own = VIEWS[kind]
    wanted = own.clone() + 1
    write(own, wanted)
    assert torch.equal(own, wanted)


@pytest.mark.parametrize("kind", VIEWS)
def test_a_buffer_that_a_forward_has_changed_is_restored(kind):
    module, own = torch.nn.Module(), VIEWS[kind]
    module.register_buffer("mean", own)
    before, value = LayerState([("layer", module)]).read(), own.clone()
    write(own, value + 1)
    before.write()
    assert module.mean is own and torch.equal(own, value)
