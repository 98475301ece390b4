"""Every module of torch.nn gets the gradients that it gets without recomputation, wherever it is in a chunk."""

import inspect
from math import prod

import pytest
import torch
from torch import nn

from tests.runtime.one_rank import one_rank, run

_NO_LAYERS = {
    *(
        "Container",
        "DataParallel",
        "Module",
        "ModuleDict",
        "ModuleList",
        "ParameterDict",
        "ParameterList",
        "Sequential",
    ),
    *("RNNBase", "RNNCellBase"),  # Bases of others.
    "SyncBatchNorm",  # Needs a GPU.
}
_ARGUMENTS = {
    "AdaptiveLogSoftmaxWithLoss": (8, 12, [4, 8]),
    "Bilinear": (4, 4, 3),
    "ChannelShuffle": (2,),
    "CircularPad": (1,),
    "ConstantPad": (1, 0.5),
    "Conv": (4, 3, 3),
    "ConvTranspose": (4, 3, 3),
    "CrossMapLRN2d": (3,),
    "Dropout": (0.3,),
    "Embedding": (5, 3),
    "EmbeddingBag": (5, 3, None, 2.0, False, "max"),
    "Fold": ((4, 4), 2),
    "FractionalMaxPool2d": (2, 3),
    "FractionalMaxPool3d": (2, 2),
    "GroupNorm": (2, 4),
    "InstanceNorm": (4, 1e-5, 0.1, True, True),
    "LPPool": (2.0, 2),
    "LinearCrossEntropyLoss": (8, 5),
    "LayerNorm": (8,),
    "LocalResponseNorm": (2,),
    "MultiheadAttention": (8, 2, 0.1),
    "PixelShuffle": (2,),
    "PixelUnshuffle": (2,),
    "ReflectionPad": (1,),
    "ReplicationPad": (1,),
    "RMSNorm": (8,),
    "Threshold": (0.1, 0.5),
    "Transformer": (8, 2, 1, 1, 16),
    "TransformerDecoder": (nn.TransformerDecoderLayer(8, 2, 16), 1),
    "TransformerDecoderLayer": (8, 2, 16),
    "TransformerEncoder": (nn.TransformerEncoderLayer(8, 2, 16), 1),
    "TransformerEncoderLayer": (8, 2, 16),
    "Unflatten": (1, (2, 2)),
    "Unfold": (2,),
    "Upsample": (None, 2),
    "UpsamplingBilinear2d": (None, 2),
    "UpsamplingNearest2d": (None, 2),
    "ZeroPad": (1,),
    **dict.fromkeys(("AdaptiveAvgPool", "AdaptiveMaxPool", "AvgPool", "MaxPool", "MaxUnpool"), (2,)),
    **dict.fromkeys(("BatchNorm",), (4,)),
    **dict.fromkeys(("GRU", "GRUCell", "LSTM", "LSTMCell", "RNN", "RNNCell", "Linear"), (8, 8)),
}
"""Arguments by the name of a class, or of the classes that differ in a number of dimensions only."""
_CLASSES, _SIGNS = torch.tensor([1, 0]), torch.tensor([1.0, -1.0])
_INPUTS = {
    "AdaptiveLogSoftmaxWithLoss": ((2, 8), _CLASSES),
    "BCELoss": ((2, 4), torch.full((2, 4), 0.3)),
    "Bilinear": ((2, 4), (2, 4)),
    "CTCLoss": ((6, 2, 5), torch.ones(2, 3, dtype=torch.long), torch.tensor([6, 6]), torch.tensor([3, 2])),
    "CosineEmbeddingLoss": ((2, 8), (2, 8), _SIGNS),
    "CrossEntropyLoss": ((2, 8), _CLASSES),
    "Embedding": (torch.tensor([[1, 2], [2, 4]]),),
    "EmbeddingBag": (torch.tensor([[1, 2], [2, 4]]),),
    "Fold": ((2, 8, 9),),
    "GaussianNLLLoss": ((2, 4), (2, 4), torch.full((2, 4), 0.3)),
    "LSTMCell": ((2, 8),),
    "GRUCell": ((2, 8),),
    "RNNCell": ((2, 8),),
    "LinearCrossEntropyLoss": ((2, 8), _CLASSES),
    "MaxUnpool1d": ((2, 4, 4), torch.arange(4).mul(2).expand(2, 4, 4)),
    "MaxUnpool2d": ((2, 4, 2, 2), torch.tensor([[0, 2], [8, 10]]).expand(2, 4, 2, 2)),
    "MaxUnpool3d": ((2, 4, 1, 2, 2), torch.tensor([[0, 2], [8, 10]]).expand(2, 4, 1, 2, 2)),
    "MultiLabelMarginLoss": ((2, 4), torch.tensor([[0, 2, -1, 1], [1, -1, 0, 2]])),
    "MultiMarginLoss": ((2, 8), _CLASSES),
    "MultiheadAttention": ((2, 3, 8), (2, 3, 8), (2, 3, 8)),
    "NLLLoss": ((2, 8), _CLASSES),
    "NLLLoss2d": ((2, 4, 2, 2), torch.ones(2, 2, 2, dtype=torch.long)),
    "MarginRankingLoss": ((2,), (2,), _SIGNS),
    "TransformerDecoder": ((2, 3, 8), (2, 3, 8)),
    "TransformerDecoderLayer": ((2, 3, 8), (2, 3, 8)),
    "Transformer": ((2, 3, 8), (2, 3, 8)),
    "TripletMarginLoss": ((2, 8), (2, 8), (2, 8)),
    "TripletMarginWithDistanceLoss": ((2, 8), (2, 8), (2, 8)),
    "PairwiseDistance": ((2, 8), (2, 8)),
    "CosineSimilarity": ((2, 8), (2, 8)),
    **dict.fromkeys(("GRU", "LSTM", "RNN", "TransformerEncoder", "TransformerEncoderLayer"), ((2, 3, 8),)),
}
"""Inputs by name: the shape of one that needs a gradient, or a tensor that needs none."""
_SHAPES = {"1d": (2, 4, 8), "2d": (2, 4, 4, 4), "3d": (2, 4, 4, 4, 4)}
NAMES = sorted(
    name
    for name, kind in vars(nn).items()
    if inspect.isclass(kind) and issubclass(kind, nn.Module) and name not in _NO_LAYERS and not name.startswith("Lazy")
)


def in_place(name):
    return "inplace" in inspect.signature(getattr(nn, name)).parameters


class Called(nn.Module):
    """Makes the inputs of a module of torch.nn from a vector. Returns all that it returns as one vector."""

    def __init__(self, name, **named):
        super().__init__()
        family = name[:-2] if name[-2:] in _SHAPES else name
        self.module = getattr(nn, name)(*_ARGUMENTS.get(name, _ARGUMENTS.get(family, ())), **named)
        shape = _SHAPES.get(name[-2:], (2, 4, 4, 4) if name in ("PixelShuffle", "PixelUnshuffle") else (2, 4, 8))
        is_loss = name.endswith("Loss")
        self.inputs = _INPUTS.get(name, (shape, torch.ones(shape)) if is_loss else (shape,))

    def forward(self, vector):
        # In (0, 1), as some losses demand; nothing saves the result, so that the module may change it in place.
        vector, given = vector.sigmoid() + 0.0, []
        for each in self.inputs:
            if not isinstance(each, torch.Tensor):
                each, vector = vector[: prod(each)].view(each), vector[prod(each) :]
            given.append(each)
        returned = self.module(*given)
        found = [each.reshape(-1) for each in _tensors(returned) if each.is_floating_point()]
        return found[0] if len(found) == 1 else torch.cat(found)


def _tensors(returned):
    if isinstance(returned, torch.Tensor):
        return [returned]
    return [tensor for each in returned if each is not None for tensor in _tensors(each)]


ORDER = "F0.0 F0.1 F1.0 F1.1 F2.0 F2.1 B2.0 B2.1 B1.0 B1.1 B0.0 B0.1"


def trained(name, named, place, recompute, change=lambda module: module):
    """Trains the module in the second of three chunks. Returns losses, gradients and buffers.

    Args:
        change: returns what to train in the module's place.
    """
    torch.manual_seed(0)
    called = Called(name, **named)
    called.module = change(called.module)
    layers = {"beginning": [called, nn.Tanh()], "middle": [nn.Tanh(), called, nn.Tanh()], "end": [nn.Tanh(), called]}
    first = nn.Linear(4, 640)
    modules = nn.ModuleList([first, called])
    for parameter in modules.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    inputs = [torch.randn(4), torch.randn(4)]
    losses = run(one_rank([[first], layers[place], [nn.Tanh()]]), inputs, ORDER, recompute)
    return losses, [parameter.grad for parameter in modules.parameters()], list(modules.buffers())


@pytest.fixture(autouse=True)
def fresh_memory_is_nan():
    """What an operation has not written yet is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "named"),
    [(name, named) for name in NAMES for named in ({}, {"inplace": True}) if not named or in_place(name)],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_gradients_are_those_without_recomputation(name, named):
    for place in ("beginning", "middle", "end"):
        losses, gradients, buffers = trained(name, named, place, recompute=False)
        again = trained(name, named, place, recompute=True)
        assert again[0] == losses, place
        for one, other in zip(again[1] + again[2], gradients + buffers, strict=True):
            assert (one is None and other is None) or (torch.equal(one, other) and one.isfinite().all()), place


def scripted(module):
    torch.manual_seed(1)
    return torch.jit.script(nn.Sequential(module, nn.Tanh(), nn.Linear(8, 8), nn.RReLU(0.2, 0.2)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("name", ["BatchNorm1d", "Linear", "RReLU", "Softplus"])
def test_scripted_modules_save_the_same_in_every_call(name):
    """TorchScript would optimize the second call of a function, which the second training shares."""
    found, expected = (trained(name, {}, "end", recompute, scripted) for recompute in (True, False))
    torch.testing.assert_close(found[0], expected[0])
    for one, other in zip(found[1] + found[2], expected[1] + expected[2], strict=True):
        torch.testing.assert_close(one, other)
