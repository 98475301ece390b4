"""LAMB on whole tensors in one process, written from its formulas."""

from collections import Counter

import torch
from torch import Tensor


class ReferenceLamb:
    """LAMB as DeepSpeed's kernel computes it or, with ``paper``, as the paper and apex do. It computes in fp64.

    Args:
        weights: the tensors by name.
        decay: the weight decay of every name.
        always: whether tensors without weight decay have a ratio too.
    """

    def __init__(self, weights, lr, decay, eps=1e-6, bounds=(0.01, 10.0), betas=(0.9, 0.999), paper=False, always=True):
        self.weights = {name: weight.double() for name, weight in weights.items()}
        self.moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in self.weights.items()}
        self.lr, self.decay, self.eps, self.bounds, self.betas = lr, decay, eps, bounds, betas
        self.paper, self.always, self.steps = paper, always, Counter()

    def step(self, gradients: dict[str, Tensor]) -> None:
        """Steps the tensors that have gradients."""
        (beta1, beta2), (smallest, largest) = self.betas, self.bounds
        # apex counts steps for a group, not for a tensor.
        self.steps.update(list(self.weights if self.paper else gradients))
        for name in gradients:
            short1, short2 = 1 - beta1 ** self.steps[name], 1 - beta2 ** self.steps[name]
            weight, gradient, decay = self.weights[name], gradients[name].double(), self.decay[name]
            first, second = self.moments[name]
            first, second = beta1 * first + (1 - beta1) * gradient, beta2 * second + (1 - beta2) * gradient**2
            self.moments[name] = first, second
            if self.paper:
                rate, update = self.lr, (first / short1) / ((second / short2).sqrt() + self.eps) + decay * weight
            else:
                rate, update = self.lr * short2**0.5 / short1, first / (second.sqrt() + self.eps) + decay * weight
            ratio = 1.0
            if weight.norm() > 0 and update.norm() > 0 and (self.always or decay):
                ratio = min(max(float(weight.norm() / update.norm()), smallest), largest)
            self.weights[name] = weight - rate * ratio * update
