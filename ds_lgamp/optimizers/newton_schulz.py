"""Makes matrices nearly orthogonal: all singular values become about 1."""

from typing import NamedTuple

import torch

METHODS = ("standard", "gram")
_RESTART = 2
"""The step of the gram method that begins anew from the matrix, because its products lose digits."""


class NewtonSchulz(NamedTuple):
    """A Newton-Schulz iteration with quintic polynomials: X becomes a X + b (X X^T) X + c (X X^T)^2 X.

    Source: K. Jordan and others, "Muon: An optimizer for hidden layers in neural networks", 2024.
    """

    method: str = "standard"
    """standard: in bf16, rounded as in torch.optim.Muon. gram: iterates on X X^T, which is small if X is oblong, and
    multiplies by X at the end; in fp16, or in fp32 on a CPU. It is the default of DeepSpeed's Muon."""
    coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    steps: int = 5
    eps: float = 1e-7
    """The least norm by which a matrix is divided."""

    @property
    def input_dtype(self) -> torch.dtype:
        """The smallest type of the matrix that leaves the result as it is. The standard method rounds the matrix before
        anything else; the gram method divides it by its norm first."""
        return torch.bfloat16 if self.method == "standard" else torch.float32

    def output_dtype(self, device: torch.device) -> torch.dtype:
        """The type of the result."""
        if self.method == "standard":
            return torch.bfloat16
        return torch.float32 if device.type == "cpu" else torch.float16

    def __call__(self, matrix: torch.Tensor) -> torch.Tensor:
        """Returns the orthogonal matrix near ``matrix`` [rows, columns]."""
        wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
        made = (self._standard if self.method == "standard" else self._gram)(wide)
        return made if wide is matrix else made.T

    def _standard(self, matrix: torch.Tensor) -> torch.Tensor:
        a, b, c = self.coefficients
        x = matrix.to(torch.bfloat16)
        x = x / x.norm().clamp(min=self.eps)
        for _ in range(self.steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x

    def _gram(self, matrix: torch.Tensor) -> torch.Tensor:
        a, b, c = self.coefficients
        x = (matrix / (matrix.norm() + self.eps)).to(self.output_dtype(matrix.device))
        gram, factor = x @ x.T, None
        for step in range(self.steps):
            if factor is not None and step == _RESTART:
                x = factor @ x
                gram, factor = x @ x.T, None
            polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            polynomial.diagonal().add_(a)
            factor = polynomial if factor is None else polynomial @ factor
            if step + 1 not in (_RESTART, self.steps):
                gram = polynomial @ gram @ polynomial
        return x if factor is None else factor @ x
