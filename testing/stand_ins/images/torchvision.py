"""Replaces the parts of torchvision that public examples and tests use.

Random images replace CIFAR-10, in the sizes that the transforms would give. AlexNet comes from DeepSpeedExamples and
has no dropout, because dropout's random numbers depend on the order of work.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

__version__ = "0.5.0"
# Makes this module a package, so that the modules below can be imported.
__path__: list[str] = []


class Images(torch.utils.data.Dataset):
    """Normalised images, each with its own seed."""

    def __init__(self, size: int, shape: tuple[int, ...], classes: int) -> None:
        self.size, self.shape, self.classes = size, shape, classes

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index >= self.size:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        label = int(torch.randint(self.classes, (), generator=generator))
        return torch.randn(self.shape, generator=generator), label


def fake_data(size: int, image_size: tuple[int, ...], num_classes: int, **options: Any) -> Images:
    return Images(size, image_size, num_classes)


def cifar10(transform: Callable[[Any], tuple[int, ...]] | None = None, **options: Any) -> Images:
    """Makes 256 images. ``transform`` is one of the stand-ins below and returns their size."""
    return Images(256, (3, 32, 32) if transform is None else transform((3, 32, 32)), 10)


def alexnet(**options: Any) -> nn.Module:
    from alexnet import AlexNet

    made = AlexNet(**options)
    for module in made.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return made


def _compose(steps: list[Callable]) -> Callable:
    def size_after(shape: tuple[int, ...]) -> tuple[int, ...]:
        for step in steps:
            shape = step(shape)
        return shape

    return size_after


def _keep(*arguments: Any, **options: Any) -> Callable:
    return lambda shape: shape


def _cut(size: int) -> Callable:
    return lambda shape: (shape[0], size, size)


def _offer(name: str, **names: Any) -> ModuleType:
    """Makes a module of this package that holds ``names``."""
    module = ModuleType(f"{__name__}.{name}")
    vars(module).update(names)
    sys.modules[module.__name__] = module
    return module


transforms = _offer(
    "transforms", Compose=_compose, Resize=_cut, CenterCrop=_cut, ToTensor=_keep, Normalize=_keep, Lambda=_keep
)
models = _offer("models", AlexNet=alexnet, vgg19=None)
datasets = _offer("datasets", CIFAR10=cifar10, FakeData=fake_data, VisionDataset=torch.utils.data.Dataset)
