"""Ways of real training scripts: random numbers of one's own, settings that a forward reads indirectly, hooks with
state, weights that the script changes, and losses."""

_ONE = {"pipeline_ranks": "1"}
"""For what a script reads that only the rank of a block has."""

_SOURCES = {
    "a generator of torch": ("", "torch.Generator().manual_seed(0)", "torch.rand(WIDTH, generator=self.source)"),
    "a generator of Python": ("import random", "random.Random(0)", "self.source.random()"),
    "a generator of NumPy": ("import numpy", "numpy.random.default_rng(0)", "float(self.source.random())"),
    "a cycle": ("import itertools", "itertools.cycle([1, 2])", "next(self.source)"),
    "a generator function": (
        "def draws():\n    while True:\n        yield from (1, 2)",
        "draws()",
        "next(self.source)",
    ),
    "a counter in a closure": (
        "def counter():\n    calls = 0\n\n    def count():\n        nonlocal calls\n        calls += 1\n"
        "        return 1 + 0.2 * (calls % 3)\n\n    return count",
        "counter()",
        "self.source()",
    ),
}
"""By name: what it needs, what makes it, and what draws from it."""


def _draws() -> dict[str, dict[str, str]]:
    """Every source, in blocks, there in training alone, and before them."""
    ways = {}
    for name, (top, made, drawn) in _SOURCES.items():
        of_block = {"top": top, "block_init": f"self.source = {made}"}
        ways[f"{name} in blocks"] = {**of_block, "inside": f"y = y * {drawn}"}
        ways[f"{name} in blocks in training"] = {**of_block, "inside": f"if self.training:\n    y = y * {drawn}"}
        of_model = {"top": top, "model_init": f"self.source = {made}"}
        ways[f"{name} before blocks"] = {**of_model, "before_blocks": f"x = x * {drawn}"}
    return ways


DRAWS = _draws()

_TRAINS = "if self.training:\n    "
TRAINING: dict[str, dict[str, str]] = {
    "a counter in a class in training": {
        "inside": f"{_TRAINS}Block.calls = getattr(Block, 'calls', 0) + 1\n    y = y * (1 + 0.2 * (Block.calls % 3))"
    },
    "a counter in slots in training": {
        "top": "class Counter:\n    __slots__ = ('calls',)",
        "block_init": "self.counter = Counter()\nself.counter.calls = 0",
        "inside": f"{_TRAINS}self.counter.calls += 1\n    y = y * (1 + 0.2 * (self.counter.calls % 3))",
    },
    "a counter in a default in training": {
        "top": "def count(number, calls={}):\n    calls[number] = calls.get(number, 0) + 1\n"
        "    return 1 + 0.2 * (calls[number] % 3)",
        "inside": f"{_TRAINS}y = y * count(self.number)",
    },
    "a counter of the script in training": {
        "top": "CALLS = torch.zeros(8)",
        "inside": f"{_TRAINS}CALLS[self.number] += 1\n    y = y * (1 + 0.2 * (CALLS[self.number].item() % 3))",
    },
    "a counter in an object that blocks share in training": {
        "top": "class State:\n    calls = 0",
        "model_init": "self.state = State()",
        "made": "for block in model.blocks:\n    block.state = model.state",
        "inside": f"{_TRAINS}self.state.calls += self.number == 0\n    y = y * (1 + 0.2 * (self.state.calls % 3))",
    },
    "a mask in a global in training": {
        "top": "SHARED = {}",
        "before_blocks": f'{_TRAINS}SHARED["keep"] = (tokens % 2).float().unsqueeze(-1)',
        "inside": f'{_TRAINS}y = y * SHARED["keep"]',
    },
    "a scale from the first values in training": {
        "block_init": "self.scale = nn.Parameter(torch.ones(WIDTH))\nself.ready = False",
        "inside": "if self.training and not self.ready:\n    with torch.no_grad():\n"
        "        self.scale.copy_(1 / (y.abs().mean((0, 1)) + 0.1))\n    self.ready = True\ny = y * self.scale",
    },
    "codes that follow values": {
        "block_init": "self.register_buffer('codes', torch.randn(4, WIDTH))",
        "inside": "flat = y.detach().flatten(0, 1)\nnearest = torch.cdist(flat, self.codes).argmin(1)\n"
        "quantised = self.codes[nearest].view_as(y)\nif self.training:\n    one = F.one_hot(nearest, 4).float()\n"
        "    self.codes.lerp_((one.t() @ flat) / (one.sum(0)[:, None] + 1), 0.3)\n"
        "y = y + 0.3 * (quantised - y).detach()",
    },
    "biases of experts that the script moves": {
        "block_init": "self.register_buffer('bias', torch.zeros(WIDTH))\n"
        "self.register_buffer('counts', torch.zeros(WIDTH))",
        "inside": "gates = (y + self.bias).softmax(-1)\nif self.training:\n"
        "    self.counts += gates.detach().sum((0, 1))\ny = y * gates",
        "after_step": "for block in model.blocks:\n"
        "    block.bias.add_(0.1 * torch.sign(block.counts.mean() - block.counts))\n    block.counts.zero_()",
    },
}


def _reached(read: str, write: str, **slots: str) -> dict[str, str]:
    """Returns a setting by micro-batch: how a block reads it, and how the script writes a ``value``."""
    written = f"value = 1.0 + number\n{write}"
    return {"inside": f"y = y * {read}", "before_call": written, **slots}


_STATE = "STATE = {'scale': 1.0}"
_SCALE = "class Scale:\n    scale = 1.0\n\n    def __call__(self):\n        return self.scale\n\n\nSCALE = Scale()"
REACHED: dict[str, dict[str, str]] = {
    "a setting in a function that blocks call": _reached(
        "scale()", "STATE['scale'] = value", top=f"{_STATE}\n\n\ndef scale():\n    return STATE['scale']"
    ),
    "a setting in a method": _reached(
        "self.scaled()", "STATE['scale'] = value", top=_STATE, block_init="self.scaled = lambda: STATE['scale']"
    ),
    "a setting in a property": _reached(
        "self.scale", "STATE['scale'] = value", top=_STATE, made="Block.scale = property(lambda self: STATE['scale'])"
    ),
    "a setting in a closure": _reached(
        "self.get()",
        "PUT(value)",
        top="def setting():\n    kept = 1.0\n\n    def put(value):\n        nonlocal kept\n        kept = value\n\n"
        "    return (lambda: kept), put\n\n\nGET, PUT = setting()",
        block_init="self.get = GET",
    ),
    "a setting in a hook": {
        "top": _STATE,
        "made": "for block in model.blocks:\n"
        "    block.mix.register_forward_hook(lambda module, given, output: output * STATE['scale'])",
        "before_call": "STATE['scale'] = 1.0 + number",
    },
    "a setting in a replaced forward": {
        "top": _STATE,
        "made": "for block in model.blocks:\n"
        "    block.mix.forward = (lambda forward: lambda x: forward(x) * STATE['scale'])(block.mix.forward)",
        "before_call": "STATE['scale'] = 1.0 + number",
    },
    "a setting in a global object": _reached("SCALE.scale", "SCALE.scale = value", top=_SCALE),
    "a setting in a callable object": _reached("SCALE()", "SCALE.scale = value", top=_SCALE),
    "a setting in a bound method": _reached(
        "self.get()",
        "SCALE.scale = value",
        top=_SCALE,
        block_init="self.get = SCALE.__call__",
    ),
    "a setting in another module": _reached(
        "config.scale",
        "config.scale = value",
        top="import types\n\nconfig = types.ModuleType('config')\nconfig.scale = 1.0",
    ),
    "a setting in another class": _reached(
        "Schedule.value()",
        "Schedule.scale = value",
        top="class Schedule:\n    scale = 1.0\n\n    @classmethod\n    def value(cls):\n        return cls.scale",
    ),
    "a setting deep in a configuration": _reached(
        "self.config['model'][0].scale",
        "model.blocks[0].config['model'][0].scale = value",
        top="from types import SimpleNamespace",
        block_init="self.config = {'model': [SimpleNamespace(scale=1.0)]}",
    ),
    "a setting in slots": _reached(
        "self.config.scale",
        "model.blocks[0].config.scale = value",
        top="class Config:\n    __slots__ = ('scale',)",
        block_init="self.config = Config()\nself.config.scale = 1.0",
    ),
    "a setting in an array": _reached(
        "float(SCALES[0])", "SCALES[0] = value", top="import numpy\n\nSCALES = numpy.ones(1)"
    ),
    "a setting in a tensor in a list": _reached(
        "self.scales[0]", "model.blocks[0].scales[0].fill_(value)", block_init="self.scales = [torch.ones(1)]"
    ),
    "a setting in the data of a buffer": _reached(
        "self.scale",
        "model.blocks[0].scale.data.fill_(value)",
        block_init="self.register_buffer('scale', torch.ones(1))",
    ),
    "a setting in a context variable": _reached(
        "SCALE.get()",
        "SCALE.set(value)",
        top="from contextvars import ContextVar\n\nSCALE = ContextVar('scale', default=1.0)",
    ),
    "a setting in a default": _reached(
        "scale()",
        "scale.__defaults__[0]['scale'] = value",
        top="def scale(state={'scale': 1.0}):\n    return state['scale']",
    ),
    "a setting in an attribute of a function": _reached(
        "scale()", "scale.scale = value", top="def scale():\n    return scale.scale\n\n\nscale.scale = 1.0"
    ),
    "a setting behind a weak reference": _reached(
        "self.owner().scale",
        "SCALE.scale = value",
        top=f"import weakref\n\n\n{_SCALE}",
        block_init="self.owner = weakref.ref(SCALE)",
    ),
    "a setting in a module that is not registered": _reached(
        "self.others[0].scale",
        "model.blocks[0].others[0].scale = value",
        block_init="self.others = [nn.Identity()]\nself.others[0].scale = 1.0",
    ),
    "a function that is replaced": _reached(
        "scale()", "Block.scale = staticmethod(lambda: value)", made="Block.scale = staticmethod(lambda: 1.0)"
    )
    | {"inside": "y = y * self.scale()"},
    "a setting in a backward": {
        "top": f"{_STATE}\n\n\nclass Reversed(torch.autograd.Function):\n    @staticmethod\n"
        "    def forward(context, x):\n        return x * 1.0\n\n    @staticmethod\n"
        "    def backward(context, gradient):\n        return gradient * STATE['scale']",
        "inside": "y = Reversed.apply(y)",
        "before_call": "STATE['scale'] = 1.0 - number",
    },
    "a setting in a hook of gradients": {
        "top": _STATE,
        "made": "for block in model.blocks:\n"
        "    block.mix.weight.register_hook(lambda gradient: gradient * STATE['scale'])",
        "before_call": "STATE['scale'] = 1.0 + number",
    },
    "a hook for one call": {
        "before_call": "handle = model.blocks[0].mix.register_forward_hook(\n"
        "    lambda module, given, output: output * (1 + number)\n)",
        "unpack": "loss = output\nhandle.remove()",
    },
    "a module replaced between calls": {
        "before_call": "model.blocks[0].act = nn.Sigmoid() if number % 2 else nn.Tanh()"
    },
}

_SIGNED = "lambda gradient: gradient.sign() * gradient.abs().mean()"
BACKWARDS: dict[str, dict[str, str]] = {
    "a function that keeps values in its class": {
        "top": "class Keeping(torch.autograd.Function):\n    @staticmethod\n    def forward(context, x):\n"
        "        Keeping.kept = x.detach().abs().mean()\n        return x * 1.0\n\n    @staticmethod\n"
        "    def backward(context, gradient):\n        return gradient * Keeping.kept",
        "inside": "y = Keeping.apply(y)",
    },
    "a hook that reads what a forward kept": {
        "made": "def keep(module, given, output):\n    module.kept = output.detach().abs().mean()\n\n\n"
        "def scale(module, given, output):\n    return (given[0] * (1 + module.kept),)\n\n\n"
        "for block in model.blocks:\n    block.mix.register_forward_hook(keep)\n"
        "    block.mix.register_full_backward_hook(scale)",
    },
    "a hook of gradients that steers the next forward": {
        "block_init": "self.scale = 1.0",
        "inside": "y = y * self.scale",
        "made": "def note(module, given, output):\n    module.scale = 1 + output[0].abs().mean().item()\n\n\n"
        "for block in model.blocks:\n    block.register_full_backward_hook(note)",
    },
    "a hook of signs of gradients": {
        "made": f"for block in model.blocks:\n    block.mix.weight.register_hook({_SIGNED})"
    },
    "a hook of signs of gradients of a tied head": {
        "made": f"model.head.weight = model.embed.weight\nmodel.embed.weight.register_hook({_SIGNED})"
    },
    "a hook of signs of gradients of the head": {"made": f"model.head.weight.register_hook({_SIGNED})"},
    "a hook before the backward of blocks": {
        "made": "for block in model.blocks:\n"
        "    block.register_full_backward_pre_hook(lambda module, output: (output[0] * 0.5,))"
    },
    "a derivative inside blocks": {
        "inside": "if y.requires_grad:\n    y = y + 0.1 * torch.autograd.grad(y.pow(3).sum(), y, create_graph=True)[0]"
    },
    "a vmap inside blocks": {"inside": "y = torch.func.vmap(self.mix)(y)"},
    "other weights for a call": {
        "inside": "halves = {name: value * 0.5 for name, value in self.mix.named_parameters()}\n"
        "y = y + torch.func.functional_call(self.mix, halves, (y,))"
    },
    "complex numbers": {"inside": "y = y + 0.1 * torch.fft.fft(torch.fft.fft(y, dim=-1), dim=-2).real"},
}

_EACH = "with torch.no_grad():\n    for parameter in model.parameters():\n        "
_GROUPS = "for group in engine.optimizer.param_groups:\n    "
WEIGHTS: dict[str, dict[str, str]] = {
    "an average of weights": {
        "begin": "average = [parameter.detach().clone() for parameter in model.parameters()]",
        "after_step": "for mean, parameter in zip(average, model.parameters()):\n"
        "    mean.lerp_(parameter.detach(), 0.1)\n"
        "seen['average', step] = sum(mean.abs().sum().item() for mean in average)",
    },
    "an averaged copy that evaluates": {
        "begin": "average = torch.optim.swa_utils.AveragedModel(model)",
        "after_step": "average.update_parameters(model)\nwith torch.no_grad():\n"
        "    seen['average', step] = average.eval()(*batch(step, 0, 0)).item()",
        "unpack": "loss = output",
    },
    "weights that the script clamps": {"after_step": f"{_EACH}parameter.clamp_(-0.3, 0.3)"},
    "weights that the script clamps in their data": {"after_step": f"{_EACH}parameter.data.clamp_(-0.3, 0.3)"},
    "a head that is reset": {"before_step": "if step == 1:\n    nn.init.constant_(model.head.weight, 0.1)"},
    "a state that comes back": {
        "before_step": "if step == 1:\n    kept = {name: value.clone() for name, value in model.state_dict().items()}\n"
        "if step == 2:\n    model.load_state_dict(kept)",
        **_ONE,
    },
    "a weight decay by step": {"before_step": f'{_GROUPS}group["weight_decay"] = 0.1 * step'},
    "a learning rate by call": {"after_calls": f'{_GROUPS}group["lr"] *= 0.9'},
    "a block frozen for a step": {"before_step": "model.blocks[0].requires_grad_(step != 1)"},
    "the gradients of a model dropped inside a batch": {"before_call": "if number == 1:\n    model.zero_grad()"},
    "the gradients of a model dropped after every step": {"after_step": "model.zero_grad(set_to_none=False)"},
    "a term of weights in the loss of the script": {
        "unpack": "loss = output + 0.1 * sum(parameter.pow(2).sum() for parameter in model.parameters())"
    },
    "a block replaced by a copy": {
        "top": "import copy",
        "before_step": "if step == 1:\n    model.blocks[1] = copy.deepcopy(model.blocks[1])",
    },
    "blocks that change places": {
        "before_step": "if step == 1:\n    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]"
    },
    "a head tied in the middle": {"before_step": "if step == 1:\n    model.head.weight = model.embed.weight"},
    "a part of a block replaced": {"before_step": "if step == 1:\n    model.blocks[0].mix = nn.Identity()"},
    "a dtype of the script": {
        "begin": "torch.set_default_dtype(torch.bfloat16)",
        "scaled": "loss / 3",
        "after_step": "if step == STEPS - 1:\n    torch.set_default_dtype(torch.float32)",
    },
}

_FLAT = "logits.flatten(0, 1), targets.flatten()"
CRITERIA: dict[str, dict[str, str]] = {
    name: {"end": text}
    for name, text in {
        "smoothed labels": f"loss = F.cross_entropy({_FLAT}, label_smoothing=0.1)",
        "an ignored label": f"loss = F.cross_entropy({_FLAT}, ignore_index=3)",
        "weights of classes": f"loss = F.cross_entropy({_FLAT}, weight=torch.linspace(0.5, 1.5, VOCABULARY))",
        "a sum of losses": f"loss = F.cross_entropy({_FLAT}, reduction='sum') / targets.numel()",
        "weights of tokens": f"loss = F.cross_entropy({_FLAT}, reduction='none')\n"
        "loss = (loss * (1 + targets.flatten() % 2)).mean()",
        "a term of logits": f"loss = F.cross_entropy({_FLAT}) + 0.1 * logits.logsumexp(-1).pow(2).mean()",
        "shifted labels": "loss = F.cross_entropy(logits[:, -2:].flatten(0, 1), tokens[:, -2:].flatten())",
        "capped logits": f"logits = 3 * torch.tanh(logits / 3)\nloss = F.cross_entropy({_FLAT})",
        "logarithms of probabilities": "loss = F.nll_loss(logits.flatten(0, 1).log_softmax(-1), targets.flatten())",
        "a focal loss": f"loss = F.cross_entropy({_FLAT}, reduction='none')\n"
        "loss = ((1 - (-loss).exp()) ** 2 * loss).mean()",
        "transposed logits": "loss = F.cross_entropy(logits.transpose(1, 2), targets)",
        "the largest losses": f"loss = F.cross_entropy({_FLAT}, reduction='none').topk(1).values.mean()",
        "soft labels": "soft = F.one_hot(targets.flatten(), VOCABULARY) * 0.9 + 0.1 / VOCABULARY\n"
        "loss = F.cross_entropy(logits.flatten(0, 1), soft)",
    }.items()
}
