"""Modules and optimizers that cannot train, each with the sentence that refuses it."""

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.topology import ProcessTopology
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from torch import nn

from testing.deepspeed_rank import quiet
from tests.integrations.deepspeed.config.bad_input import BASE
from tests.integrations.deepspeed.linear import linears, mean_square

SHARED = nn.Parameter(torch.eye(6))


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


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = SHARED

    def forward(self, inputs):
        return inputs @ self.weight


class Float8Tensor(torch.Tensor):
    """Stands in for a weight inside Transformer Engine's fp8_model_init, which is no plain tensor."""


class Complex(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.phase = nn.Parameter(torch.zeros(6, dtype=torch.complex64))


class Narrow(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.packed = nn.Parameter(torch.zeros(6, dtype=torch.float8_e4m3fn), requires_grad=False)


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6).as_subclass(Float8Tensor))

    def forward(self, inputs):
        return inputs @ self.weight


class WithStray(PipelineModule):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.stray = nn.Parameter(torch.ones(1))


class WithForward(PipelineModule):
    def forward(self, inputs):
        with torch.autocast("cpu"):
            return super().forward(inputs)


class Head(nn.Linear):
    """Shares the weight of another class, as stock DeepSpeed allows."""


def with_hook():
    module = pipeline()
    module.register_forward_pre_hook(lambda *_: None)
    return module


def with_expert():
    module = pipeline()
    for parameter in module.parameters():
        parameter.allreduce = False
    return module


def tied_classes():
    ends = [TiedLayerSpec("ends", kind, 6, 6) for kind in (nn.Linear, Head)]
    return pipeline([ends[0], *linears(3), ends[1]])


def pipeline(layers=None, kind=PipelineModule, **options):
    options = {"num_stages": 2, **options}
    with quiet():
        return kind(linears(5) if layers is None else layers, loss_fn=mean_square, **options)


def of_three_axes():
    topology = ProcessTopology(axes=["pipe", "data", "sequence"], dims=[1, 1, 2])
    return pipeline(num_stages=None, topology=topology)


def used_module():
    module = pipeline()
    with quiet():
        deepspeed.initialize(
            model=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), config={**BASE, "ds_lgamp": {}}
        )
    return module


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


MODULES = {
    "a plain module": (
        lambda: nn.Linear(6, 6),
        "Linear has no list of blocks, so a ds_lgamp block cannot split it; write it as a PipelineModule or",
    ),
    "a module with a schedule of its own": (
        lambda: pipeline(linears(8), DualPipeVModule),
        "DualPipeVModule has no list of blocks",
    ),
    "layers that share a tensor": (lambda: pipeline([LayerSpec(Shared)] * 4), "are the same tensor; give each layer"),
    "quantized parameters": (
        lambda: pipeline([LayerSpec(Quantized)] * 4),
        "weight is a Float8Tensor, but units hold plain tensors; build its layer without fp8_model_init",
    ),
    "complex parameters": (
        lambda: pipeline([LayerSpec(Complex)] * 4),
        "is torch.complex64, which a ds_lgamp block does not train; make it a buffer",
    ),
    "parameters in fp8": (
        lambda: pipeline([LayerSpec(Narrow)] * 4),
        "is torch.float8_e4m3fn, which a cast would change; quantize it to whole numbers",
    ),
    "a parameter outside of layers": (lambda: pipeline(kind=WithStray), "parameter stray belongs to no layer"),
    "parameters of double precision": (
        lambda: pipeline().double(),
        "which a ds_lgamp block does not train; make it float32",
    ),
    "parameters of half precision": (lambda: pipeline().bfloat16(), "bf16.enabled is false; set it or remove the cast"),
    "a forward of its own": (lambda: pipeline(kind=WithForward), "the WithForward has a forward of its own, or hooks"),
    "hooks of the whole": (with_hook, "the PipelineModule has a forward of its own, or hooks, but its layers are"),
    "experts": (with_expert, "weight differs between data-parallel ranks, but not as experts of deepspeed.moe"),
    "a key for two classes": (
        tied_classes,
        "the TiedLayerSpecs of key 'ends' build Linear and Head, but the whole module is shared",
    ),
    "a module that has an engine": (used_module, "the PipelineModule has an engine already; build a new one"),
    "another axis": (of_three_axes, "the topology has 2 ranks on axis 'sequence'"),
}

OPTIMIZERS = {
    "one of whole tensors": (
        lambda module: torch.optim.Adafactor(module.parameters()),
        "optimizer is Adafactor, which keeps sums over rows and columns of whole matrices; shards take one of",
    ),
    "Muon of vectors": (
        lambda module: MuonWithAuxAdam(
            [{"params": [p for p in module.parameters() if p.dim() == 1], "use_muon": True}]
        ),
        "bias has shape [6], but Muon makes matrices orthogonal; put it into a group with use_muon False",
    ),
    "Muon of blocks that do not fit": (
        lambda module: MuonWithAuxAdam(
            [{"params": [p for p in module.parameters() if p.dim() == 2], "use_muon": True, "blocks": 4}]
        ),
        "weight has 6 rows, but its group has blocks 4; use a divisor of the rows",
    ),
    "Muon beside an Adam that does not correct its bias": (
        lambda module: MuonWithAuxAdam(
            [{"params": list(module.parameters()), "use_muon": False, "bias_correction": False}]
        ),
        "MuonWithAuxAdam with bias_correction False; here its Adam corrects its bias, set it to True",
    ),
    "Muon beside an Adam that adds decay to gradients": (
        lambda module: MuonWithAuxAdam([{"params": list(module.parameters()), "use_muon": False}], adam_w_mode=False),
        "optimizer is MuonWithAuxAdam with adam_w_mode False; here its Adam is AdamW, set it to True",
    ),
    "clipping inside LAMB": (
        lambda module: FusedLamb(module.parameters(), max_grad_norm=1.0),
        'FusedLamb with max_grad_norm 1.0; set it to 0, and write "gradient_clipping": 1.0 into the configuration',
    ),
    "foreign parameters": (
        lambda module: sgd([nn.Parameter(torch.ones(2, 3))]),
        "parameter group 0 holds a tensor of shape [2, 3] that belongs to no layer of the PipelineModule",
    ),
    "groups of other options on another rank": (
        lambda module: sgd([{"params": module.parameters(), "weight_decay": 0.1 * module.stage_id}]),
        "groups differ between pipeline ranks; give every rank the same groups",
    ),
}
