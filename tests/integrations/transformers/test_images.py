"""Models of images and text, layer by layer."""

import pytest
import torch

from ds_lgamp.config import ConfigError
from tests.integrations.transformers import images
from tests.integrations.transformers.by_hand import assert_same, computed_by, in_layers, layers_of, whole
from tests.integrations.transformers.models import micro_batch
from tests.slow import slow_except


def batch_of(name, pictures):
    return images.with_images(name, micro_batch(0, 0, 0)) if pictures else images.text(name, micro_batch(0, 0, 0))


ON_ENGINES = {"Qwen2.5-VL", "Qwen3-VL"}
"""What engines train by default."""


@pytest.mark.parametrize("name", slow_except(images.MODELS.keys() - ON_ENGINES, [*images.MODELS]))
def test_a_model_of_images_and_text_trains_on_both(name):
    model = images.make(name)
    layers = layers_of(model)
    for pictures in (True, False):
        batch = batch_of(name, pictures)
        expected = whole(model, batch)
        assert any("vis" in key for key in expected.gradients) == pictures
        assert_same(expected, computed_by(layers, model, batch))


PICTURE = {"input_ids": [[1, 3, 3, 3, 3, 5]], "pixel_values": {"shape": [1, 3, 8, 8]}}


def test_dummy_inputs_may_have_images():
    model, batch = images.make("LLaVA"), batch_of("LLaVA", True)
    assert_same(whole(model, batch), in_layers(model, batch, dummy_inputs=PICTURE))


def test_features_of_images_may_be_outputs_for_losses_of_the_script():
    """They travel to the last layer."""
    model, batch = images.make("LLaVA"), batch_of("LLaVA", True)
    output = in_layers(model, batch, outputs="all", dummy_inputs=PICTURE).output
    assert torch.equal(images.features_of(output), images.features_of(model(**batch)))
    with pytest.raises(
        ConfigError, match="output depends on what 'model.(multi_modal_projector|vision_tower)' returned"
    ):
        in_layers(images.make("LLaVA"), batch, outputs="all")
