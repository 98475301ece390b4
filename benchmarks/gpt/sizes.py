"""Sizes of the GPTs that one device trains, their operations, and peak rates of devices."""

from typing import NamedTuple

from benchmarks.record import Config

TINY = "tiny"
"""The size for a dry run on any machine."""


class GptSize(NamedTuple):
    """A GPT with learned positions and an untied head, and the batch of a step."""

    layers: int
    width: int
    heads: int
    samples: int
    """Sequences per micro-batch."""
    recompute: tuple[str, ...] = ("full", "none")
    """Recomputation modes to measure; see ``benchmarks.gpt.model.Gpt``."""
    micro_batches: int = 8
    sequence: int = 2048
    vocabulary: int = 32_000

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.micro_batches * self.samples * self.sequence

    @property
    def parameters(self) -> int:
        """About how many: a layer has 12 h^2."""
        return 12 * self.layers * self.width**2 + (2 * self.vocabulary + self.sequence) * self.width

    @property
    def state_bytes(self) -> int:
        """Of weights, gradients in fp32, master weights and Adam's state: 18 per parameter."""
        return 18 * self.parameters

    @property
    def model_flops(self) -> float:
        """Floating-point operations of a step's forward and backward passes, without recomputation.

        arXiv 2104.04473 without its recomputation: 72 L h^2 (1 + s / (6 h) + V / (12 L h)) per token. Attention counts
        as if every token saw all others.
        """
        layers, width = self.layers, self.width
        shares = 1 + self.sequence / (6 * width) + self.vocabulary / (12 * layers * width)
        return 72 * layers * width**2 * shares * self.tokens

    def config(self, name: str, recompute: str) -> Config:
        """The size's part of a row's configuration."""
        return {
            "size": name,
            "micro_batches": self.micro_batches,
            "samples": self.samples,
            "sequence": self.sequence,
            "recompute": recompute,
        }


SIZES = {
    "125M": GptSize(layers=12, width=768, heads=12, samples=8),
    "1.3B": GptSize(layers=24, width=2048, heads=16, samples=2),
    "2.7B": GptSize(layers=12, width=4096, heads=32, samples=1),
    "6.7B": GptSize(layers=32, width=4096, heads=32, samples=1, recompute=("full",)),
    TINY: GptSize(2, 32, 2, samples=2, micro_batches=3, sequence=16, vocabulary=64),
}
"""By name, the smallest first. ``TINY`` is measured only on request."""
LARGE = tuple(name for name in SIZES if name != TINY)
"""Names of the sizes for an accelerator."""

PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}
"""Dense bf16 operations per second by device name, from NVIDIA's data sheets."""
