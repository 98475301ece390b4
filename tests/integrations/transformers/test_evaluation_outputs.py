"""What a model returns in evaluation beside its logits is the model's, or says why it is not there."""

import pickle
from typing import Any

import pytest
import torch
import transformers

from ds_lgamp.integrations.split.outputs import MissingOutput
from ds_lgamp.integrations.transformers.models import without_cache
from tests.integrations.transformers import images
from tests.integrations.transformers.by_hand import assert_equal, evaluated, layers_of
from tests.integrations.transformers.models import micro_batch
from tests.integrations.transformers.shrink import small

PICTURES = {"pixel_values": {"shape": [1, 3, 8, 8]}}
WITH_IMAGE = {"dummy_inputs": {"input_ids": [[1, *[images.IMAGE] * 4, 2, 5, 6]], **PICTURES}}
PAIRS = {
    "blocks": "text_model.encoder.layers",
    "dummy_inputs": {"input_ids": [[4, 5, 6]], **PICTURES, "return_loss": True},
}


def clip() -> Any:
    text, vision = small(transformers.CLIPTextConfig), small(transformers.CLIPVisionConfig, image_size=8, patch_size=4)
    parts = {"text_config": text.to_dict(), "vision_config": vision.to_dict()}
    return transformers.CLIPModel(transformers.CLIPConfig(**parts, projection_dim=16))


def image_batch() -> dict[str, Any]:
    batch = images.with_images("LLaVA", micro_batch(0, 0, 0))
    return {name: value for name, value in batch.items() if name != "labels"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_features_of_images_are_outputs_of_an_evaluation(ranks):
    torch.manual_seed(0)
    model, batch = images.make("LLaVA"), image_batch()
    layers = layers_of(model, pipeline_ranks=ranks, **WITH_IMAGE)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert_equal(model(**batch, **without_cache(model)), evaluated(layers, batch))


def test_pictures_beside_texts_are_outputs_of_an_evaluation():
    torch.manual_seed(0)
    model = clip()
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": micro_batch(0, 0, 0)["input_ids"], "pixel_values": pixels, "return_loss": True}
    layers = layers_of(model, pipeline_ranks=2, **PAIRS)
    with torch.no_grad():
        assert_equal(model(**batch), evaluated(layers, batch))


@pytest.mark.parametrize("name", ["LLaVA", "Gemma 3 with images"])
def test_an_output_that_the_last_layer_cannot_compute_says_so_where_it_is_used(name):
    # Gemma's features are zeros as long as nothing has trained, so that numbers do not tell.
    model = images.make(name)
    batch = images.with_images(name, micro_batch(0, 0, 0))
    layers = layers_of(model)
    for _ in range(2):
        with torch.no_grad():
            output, whole = evaluated(layers, batch), model(**batch, **without_cache(model))
        assert_equal([whole.loss, whole.logits], [output.loss, output.logits])
        features = pickle.loads(pickle.dumps(images.features_of(output)))
        for use in (torch.sum, lambda value: value.shape, lambda value: value + torch.zeros(1)):
            with pytest.raises(MissingOutput, match=r"set ds_lgamp\.dummy_inputs to arguments such as this call's"):
                use(features)
