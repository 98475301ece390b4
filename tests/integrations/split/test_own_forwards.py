"""What a forward of one's own does around its blocks holds in the layers of the split model."""

import torch

from tests.integrations.split.own_models import MODELS, TiedGpt, micro_batch
from tests.integrations.split.test_own_models import gradients_of, in_layers, layers_of


class Autocasting(TiedGpt):
    """Computes in bf16 by an autocast of its own."""

    def forward(self, idx, targets=None):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(idx, targets)


def test_blocks_run_in_the_autocast_that_the_forward_enters_around_them():
    torch.manual_seed(0)
    model, batch = Autocasting(), micro_batch("a tied GPT", 0)
    expected = model(*batch)[1]
    loss = in_layers(layers_of(model), *batch)[1]
    assert torch.equal(loss, expected)
    wanted = gradients_of(model, expected)
    for parameter, gradient in gradients_of(model, loss).items():
        torch.testing.assert_close(gradient, wanted[parameter], rtol=1e-2, atol=1e-4)


def test_without_its_own_autocast_the_forward_keeps_the_one_around_the_layers():
    model, batch = MODELS["a tied GPT"](), micro_batch("a tied GPT", 0)
    layers = layers_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(in_layers(layers, *batch)[1], model(*batch)[1])
