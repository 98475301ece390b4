"""Stand-ins of optimizers that need a compiler and a GPU. They have the names and options, and never step."""

import torch


class FusedLamb(torch.optim.Optimizer):
    """Has the options of DeepSpeed's FusedLamb, which needs a compiler and a GPU."""

    __module__ = "deepspeed.ops.lamb.fused_lamb"

    def __init__(self, params, max_grad_norm=0.0, **options):
        defaults = {"bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0}
        bounds = {"max_grad_norm": max_grad_norm, "max_coeff": 10.0, "min_coeff": 0.01}
        super().__init__(params, {**defaults, **bounds, **options})


class FusedLAMB(torch.optim.Optimizer):
    """Has the options of apex's FusedLAMB."""

    __module__ = "apex.optimizers.fused_lamb"

    def __init__(self, params, max_grad_norm=0.0, grad_averaging=True, use_nvlamb=False, adam_w_mode=True, **options):
        self.adam_w_mode, self.use_nvlamb = int(adam_w_mode), use_nvlamb
        defaults = {"bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}
        clipping = {"grad_averaging": grad_averaging, "max_grad_norm": max_grad_norm}
        super().__init__(params, {**defaults, **clipping, **options})
