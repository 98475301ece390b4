"""Ways in which parameters, activations, hooks, arguments and results differ."""

from inspect import signature

from torch import nn

PARAMETERS: dict[str, dict[str, str]] = {
    "a number as a parameter in blocks": {
        "block_init": "self.scale = nn.Parameter(torch.tensor(0.5))",
        "inside": "y = y * self.scale",
    },
    "a number as a parameter of the model": {
        "model_init": "self.scale = nn.Parameter(torch.tensor(0.5))",
        "end": "+\nloss = loss * self.scale.exp()",
    },
    "a number as a parameter before blocks": {
        "model_init": "self.scale = nn.Parameter(torch.tensor(0.5))",
        "before_blocks": "x = x * self.scale",
    },
    "a transposed parameter": {
        "block_init": "self.matrix = nn.Parameter((0.3 * torch.randn(4, WIDTH)).t())",
        "inside": "y = y + y @ self.matrix @ self.matrix.t()",
    },
    "a transposed weight": {
        "made": "for block in model.blocks:\n    block.mix.weight = nn.Parameter(block.mix.weight.data.t())"
    },
    "channels-last convolutions in blocks": {
        "block_init": "self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1).to(memory_format=torch.channels_last)",
        "inside": "y = y + self.conv(y.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)",
    },
    "a channels-last convolution before blocks": {
        "model_init": "self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1).to(memory_format=torch.channels_last)",
        "before_blocks": "x = x + self.conv(x.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)",
    },
    "a part of a larger tensor as a parameter": {
        "block_init": "self.part = nn.Parameter(torch.rand(WIDTH, 4)[:, 1])",
        "inside": "y = y * self.part",
    },
    "an expanded parameter that is frozen": {
        "block_init": "self.wide = nn.Parameter(torch.rand(1).expand(WIDTH), requires_grad=False)",
        "inside": "y = y * self.wide",
    },
    "a parameter without elements": {
        "block_init": "self.none = nn.Parameter(torch.zeros(0, WIDTH))",
        "inside": "y = y + self.none.sum(0)",
    },
    "a parameter that nobody uses": {"block_init": "self.unused = nn.Parameter(torch.ones(3))"},
    "a module that nobody uses": {"model_init": "self.unused = nn.Linear(3, 3)"},
    "a frozen embedding": {"made": "model.embed.requires_grad_(False)"},
    "frozen blocks": {"made": "model.blocks[:2].requires_grad_(False)"},
    "frozen weights beside trained ones": {
        "made": "for block in model.blocks:\n    block.mix.weight.requires_grad_(False)"
    },
    "all frozen but the head": {"made": "model.requires_grad_(False)\nmodel.head.requires_grad_(True)"},
    "all frozen but the biases": {
        "made": 'for name, parameter in model.named_parameters():\n    parameter.requires_grad_(name.endswith("bias"))'
    },
    "low-rank adapters": {
        "block_init": "self.mix.requires_grad_(False)\nself.down, self.up = nn.Linear(WIDTH, 2, bias=False), "
        "nn.Linear(2, WIDTH, bias=False)",
        "inside": "y = y + self.up(self.down(y))",
    },
    "parameters in a list": {
        "block_init": "self.scales = nn.ParameterList([torch.rand(WIDTH), torch.rand(())])",
        "inside": "y = y * self.scales[0] + self.scales[1]",
    },
    "parameters in a dictionary": {
        "model_init": 'self.scales = nn.ParameterDict({"first": torch.rand(WIDTH), "last": torch.rand(WIDTH)})',
        "before_blocks": 'x = x * self.scales["first"]',
        "after_blocks": 'x = x * self.scales["last"]',
    },
    "weight norms": {"block_init": "nn.utils.parametrizations.weight_norm(self.mix)"},
    "spectral norms": {"block_init": "nn.utils.parametrizations.spectral_norm(self.mix)"},
    "a parameter of the model before blocks and after them": {
        "model_init": "self.bias = nn.Parameter(torch.rand(WIDTH))",
        "before_blocks": "x = x + self.bias",
        "after_blocks": "x = x + self.bias",
    },
    "a parameter of the model that blocks get": {
        "model_init": "self.bias = nn.Parameter(torch.rand(WIDTH))",
        "block_parameters": "+, bias",
        "block_arguments": "+, self.bias",
        "inside": "y = y + bias",
    },
    "a tensor that is no buffer": {
        "block_init": "self.table = torch.linspace(0.5, 1, WIDTH)",
        "inside": "y = y * self.table",
    },
    "a buffer that is no state": {
        "block_init": 'self.register_buffer("table", torch.linspace(0.5, 1, WIDTH), persistent=False)',
        "inside": "y = y * self.table",
    },
    "whole numbers in a buffer": {
        "model_init": 'self.register_buffer("order", torch.arange(VOCABULARY).flip(0))',
        "before_blocks": "x = x + 0.1 * self.embed(self.order[tokens])",
    },
    "fp64 in a buffer": {
        "block_init": 'self.register_buffer("precise", torch.rand(WIDTH, dtype=torch.float64))',
        "inside": "y = y * self.precise.float()",
    },
}

_ARGUMENTS = {"RReLU": "0.25, 0.25", "Threshold": "0.1, 0.0", "Softmax": "-1", "LogSoftmax": "-1", "Softmin": "-1"}
_MADE = {
    "GLU": "nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GLU())",
    "MultiheadAttention": "Attention(WIDTH, 2, batch_first=True)",
}
_ATTENTION = (
    "class Attention(nn.MultiheadAttention):\n    def forward(self, x):\n        return super().forward(x, x, x)[0]"
)
_PLACES = {
    "in the middle of": {},
    "at the end of": {"block_return": "return self.act(x + y)"},
    "at the beginning of": {"inside_first": "x = self.act(x)"},
}


def _activations() -> dict[str, dict[str, str]]:
    """Every activation of torch.nn, in place where it can be, everywhere in a block."""
    ways = {}
    for name in nn.modules.activation.__all__:
        given = _ARGUMENTS.get(name, "")
        made = {"": _MADE.get(name, f"nn.{name}({given})")}
        if "inplace" in signature(getattr(nn, name)).parameters:
            made[" in place"] = f"nn.{name}({', '.join(filter(None, (given, 'inplace=True')))})"
        for (how, text), (place, slots) in ((how, place) for how in made.items() for place in _PLACES.items()):
            top = _ATTENTION if text.startswith("Attention") else ""
            ways[f"{name}{how} {place} blocks"] = {"top": top, "act": text, **slots}
    return ways


ACTIVATIONS = _activations()

HOOKS: dict[str, dict[str, str]] = {
    "a hook after every block": {
        "made": "for block in model.blocks:\n"
        "    block.register_forward_hook(lambda module, given, output: output * 0.9)"
    },
    "a hook before every block": {
        "made": "for block in model.blocks:\n"
        "    block.register_forward_pre_hook(lambda module, given: (given[0] * 0.9, *given[1:]))"
    },
    "a hook after the embedding": {
        "made": "model.embed.register_forward_hook(lambda module, given, output: output * 0.9)"
    },
    "a hook after parts of blocks": {
        "made": "for block in model.blocks:\n"
        "    block.mix.register_forward_hook(lambda module, given, output: output * 0.9)"
    },
    "a hook after the model": {
        "made": "model.register_forward_hook(lambda module, given, output: output * 2)",
    },
    "a hook before the model": {
        "made": "model.register_forward_pre_hook(lambda module, given: ((given[0] + 1) % VOCABULARY, *given[1:]))",
    },
    "a hook that counts calls": {
        "made": "model.seen = 0\n\n\ndef count(module, given, output):\n    model.seen += 1\n"
        "    return output * (1 + 0.1 * (model.seen % 3))\n\n\n"
        "model.blocks[0].register_forward_hook(count)",
    },
    "a hook of gradients of blocks": {
        "made": "for block in model.blocks:\n"
        "    block.mix.register_full_backward_hook(lambda module, given, output: (given[0] * 0.5,))"
    },
    "a hook of gradients of hidden states": {
        "before_blocks": "if x.requires_grad:\n    x.register_hook(lambda gradient: gradient * 0.5)"
    },
    "a hook of gradients inside blocks": {
        "inside": "if y.requires_grad:\n    y.register_hook(lambda gradient: gradient * 0.5)"
    },
    "a hook of a parameter's gradient": {
        "made": "for block in model.blocks:\n    block.mix.weight.register_hook(lambda gradient: gradient * 0.5)"
    },
    "an operation of one's own": {
        "top": "class Halved(torch.autograd.Function):\n    @staticmethod\n    def forward(context, x):\n"
        "        context.save_for_backward(x)\n        return x * 0.5\n\n    @staticmethod\n"
        "    def backward(context, gradient):\n        return gradient * torch.sigmoid(context.saved_tensors[0])",
        "inside": "y = Halved.apply(y)",
    },
    "a stopped gradient inside blocks": {"inside": "y = y + y.detach()"},
    "a stopped gradient before blocks": {"before_blocks": "x = x.detach() + 0.5 * x"},
    "a part without gradients inside blocks": {
        "inside": "with torch.no_grad():\n    scale = y.abs().mean()\ny = y / scale"
    },
    "a part without gradients before blocks": {
        "before_blocks": "with torch.no_grad():\n    scale = x.abs().mean()\nx = x / scale"
    },
    "an autocast in the forward": {
        "top": "def autocast():\n    return torch.autocast('cpu', torch.bfloat16)",
        "inside": "with autocast():\n    y = self.mix(y)\ny = y.float()",
    },
    "a forward of blocks that is replaced": {
        "made": "for block in model.blocks:\n"
        "    block.forward = (lambda forward: lambda *given: forward(*given) * 0.9)(block.forward)"
    },
    "a forward of parts that is replaced": {
        "made": "for block in model.blocks:\n"
        "    block.mix.forward = (lambda forward: lambda x: forward(x) * 0.9)(block.mix.forward)"
    },
    "a function kept in blocks": {
        "block_init": "self.scaled = lambda y: y * (0.5 + 0.1 * number)",
        "inside": "y = self.scaled(y)",
    },
}

OUTPUTS: dict[str, dict[str, str]] = {
    "a tuple": {"model_return": "return logits, loss", "unpack": "loss = output[1]"},
    "a dictionary": {"model_return": 'return {"loss": loss, "logits": logits}', "unpack": 'loss = output["loss"]'},
    "an object": {
        "top": "import dataclasses\n\n\n@dataclasses.dataclass\nclass Output:\n"
        "    loss: torch.Tensor\n    logits: torch.Tensor",
        "model_return": "return Output(loss, logits)",
        "unpack": "loss = output.loss",
    },
    "a loss of shape (1,)": {"model_return": "return loss.reshape(1)", "unpack": "loss = output.sum()"},
    "a loss in a list": {"model_return": "return [loss]", "unpack": "loss = output[0]"},
    "logits for a loss of the script": {
        "model_return": "return logits",
        "unpack": "loss = F.cross_entropy(output.flatten(0, 1), targets.flatten())",
        "config": '{"outputs": "all"}',
    },
    "logits in a dictionary for a loss of the script": {
        "model_return": 'return {"logits": logits, "hidden": x, "length": tokens.shape[1]}',
        "unpack": 'loss = F.cross_entropy(output["logits"].flatten(0, 1), targets.flatten())\n'
        'loss = loss + output["hidden"].pow(2).mean() / output["length"]',
        "config": '{"outputs": "all"}',
    },
    "all outputs of a model with a loss": {
        "model_return": "return logits, loss",
        "unpack": "loss = output[1] + 0.1 * output[0].pow(2).mean()",
        "config": '{"outputs": "all"}',
    },
    "a loss scaled by the script": {"unpack": "loss = output * 0.5"},
    "a loss scaled by step in the script": {"unpack": "loss = output * (1.0 + step)"},
    "a loss scaled by micro-batch in the script": {"unpack": "loss = output * (1.0 + number)"},
    "a loss in fp64": {"model_return": "return loss.double()"},
}
