"""Models with an encoder before their blocks, and models of images, layer by layer."""

import pytest

from tests.integrations.transformers import encoders
from tests.integrations.transformers.by_hand import assert_same, in_layers, layers_of, whole
from tests.integrations.transformers.models import micro_batch
from tests.slow import slow_except


# Engines train the others by default.
@pytest.mark.parametrize("name", slow_except(["Whisper", "ViT"], [*encoders.MODELS]))
def test_a_model_trains_whose_blocks_get_what_its_encoder_returned(name):
    model, batch = encoders.make(name), encoders.inputs_of(name, micro_batch(0, 0, 0))
    assert_same(whole(model, batch), in_layers(model, batch, **encoders.BLOCKS.get(name, {})))


def test_the_encoder_belongs_to_the_first_layer():
    first, *blocks, _ = layers_of(encoders.make("BART")).modules
    assert any("encoder" in name for name, _ in first.named_parameters()) and len(blocks) == 4
