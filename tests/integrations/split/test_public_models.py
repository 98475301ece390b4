"""Models of public packages, split at their blocks, compute what they compute whole. Skipped without the packages."""

import pytest
import torch

from ds_lgamp.config import ConfigError
from tests.integrations.split.splitting import gradients_of, in_layers, layers_of

SMALL = {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_query_groups": 4, "head_size": 8, "intermediate_size": 64}
LITGPT = ["pythia-14m", "Llama-3.2-1B", "gemma-2b", "phi-2"]
TIMM = {
    "vit_tiny_patch16_224": {"depth": 3},
    "deit_tiny_distilled_patch16_224": {"depth": 3},
    "beit_base_patch16_224": {"depth": 2},
    "eva02_tiny_patch14_224": {"depth": 3},
    "vit_small_patch14_reg4_dinov2": {"depth": 3, "img_size": 224},
    "cait_xxs24_224": {"depth": 3},
    "xcit_nano_12_p16_224": {"depth": 3},
    "mixer_s16_224": {},
}


def assert_same(model, arguments, **settings):
    """Compares outputs and gradients of the model with those of its layers, in training."""
    layers = layers_of(model, outputs="all", **settings)
    computed = []
    for compute in (model, lambda *given: in_layers(layers, *given)):
        # The same masks of dropout.
        torch.manual_seed(1)
        output = compute(*arguments)
        computed.append((output, gradients_of(model, output.float().pow(2).mean())))
    (expected, wanted), (output, gradients) = computed
    torch.testing.assert_close(output, expected)
    for name, gradient in gradients.items():
        assert (gradient is None) == (wanted[name] is None), name
        if gradient is not None:
            assert (gradient - wanted[name]).norm() <= 1e-5 * wanted[name].norm() + 1e-9, name


def images(size=224):
    return {"x": {"shape": [1, 3, size, size]}}, (torch.randn(2, 3, size, size),)


@pytest.mark.parametrize("name", LITGPT)
def test_litgpt(name):
    litgpt = pytest.importorskip("litgpt")
    config = litgpt.Config.from_name(name, **SMALL, padded_vocab_size=128, block_size=64)
    assert_same(litgpt.GPT(config), (torch.randint(100, (2, 16)),))


@pytest.mark.parametrize("name", TIMM)
def test_timm(name):
    timm = pytest.importorskip("timm")
    dummy, arguments = images()
    assert_same(timm.create_model(name, **TIMM[name]), arguments, dummy_inputs=dummy)


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto", "swin_tiny_patch4_window7_224"])
def test_networks_whose_blocks_change_the_shape_are_refused(name):
    timm = pytest.importorskip("timm")
    with pytest.raises(ConfigError, match="the shape"):
        layers_of(timm.create_model(name), outputs="all", dummy_inputs=images()[0])


def test_torchvision():
    models = pytest.importorskip("torchvision.models.vision_transformer")
    dummy, arguments = images(32)
    model = models.VisionTransformer(32, 8, num_layers=3, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=10)
    # It is zero at first.
    torch.nn.init.normal_(model.heads.head.weight)
    assert_same(model, arguments, dummy_inputs=dummy)


class Encoder(torch.nn.Module):
    """Torch's own encoder with an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 3)

    def forward(self, tokens):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.encoder(self.embedding(tokens), mask=mask, is_causal=True))


def test_the_encoder_of_torch():
    assert_same(Encoder(), (torch.randint(64, (2, 16)),))
