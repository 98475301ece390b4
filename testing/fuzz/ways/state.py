"""Ways in which something reaches a block, or outlives a forward, otherwise than by arguments and results."""

BESIDE: dict[str, dict[str, str]] = {
    "a mask in attributes of blocks": {
        "block_init": "self.keep = None",
        "before_blocks": "keep = (tokens % 2).float().unsqueeze(-1)",
        "before_block": "block.keep = keep",
        "inside": "y = y * self.keep",
    },
    "a length in attributes of blocks": {
        "before_block": "block.length = tokens.shape[1]",
        "inside": "y = y / self.length",
    },
    "a number from values in attributes of blocks": {
        "before_block": "block.scale = tokens.float().mean().item() / 8",
        "inside": "y = y * self.scale",
    },
    "a result with a gradient in attributes of blocks": {
        "model_init": "self.condition = nn.Linear(WIDTH, WIDTH)",
        "before_blocks": "condition = self.condition(x)",
        "before_block": "block.condition = condition",
        "inside": "y = y + self.condition",
    },
    "a mask in a global dictionary": {
        "top": "SHARED = {}",
        "before_blocks": 'SHARED["keep"] = (tokens % 2).float().unsqueeze(-1)',
        "inside": 'y = y * SHARED["keep"]',
    },
    "a mask in a global variable": {
        "top": "KEEP = None",
        "start": "global KEEP",
        "before_blocks": "KEEP = (tokens % 3).float().unsqueeze(-1)",
        "inside": "y = y * KEEP",
    },
    "a number in a global variable": {
        "top": "LENGTH = 1",
        "start": "global LENGTH",
        "before_blocks": "LENGTH = tokens.shape[1] + tokens[0, 0].item() % 4",
        "inside": "y = y * 2 / LENGTH",
    },
    "a mask in a context variable": {
        "top": 'from contextvars import ContextVar\n\nKEEP = ContextVar("keep")',
        "before_blocks": "token = KEEP.set((tokens % 2).float().unsqueeze(-1))",
        "inside": "y = y * KEEP.get()",
        "after_blocks": "KEEP.reset(token)",
    },
    "a mask in a thread's variable": {
        "top": "import threading\n\nLOCAL = threading.local()",
        "before_blocks": "LOCAL.keep = (tokens % 2).float().unsqueeze(-1)",
        "inside": "y = y * LOCAL.keep",
    },
    "a mask in a closure": {
        "model_init": "shared = {}\nself.note = lambda keep: shared.update(keep=keep)",
        "made": "shared = model.note.__closure__[0].cell_contents\nfor block in model.blocks:\n"
        '    block.read = lambda: shared["keep"]',
        "before_blocks": "self.note((tokens % 2).float().unsqueeze(-1))",
        "inside": "y = y * self.read()",
    },
    "a mask on the model, which blocks refer to": {
        "model_init": "self.keep = None",
        "made": "for block in model.blocks:\n    block.owner = [model]",
        "before_blocks": "self.keep = (tokens % 2).float().unsqueeze(-1)",
        "inside": "y = y * self.owner[0].keep",
    },
    "a mask in an object that model and blocks share": {
        "top": "class Context:\n    keep = None",
        "model_init": "self.context = Context()",
        "made": "for block in model.blocks:\n    block.context = model.context",
        "before_blocks": "self.context.keep = (tokens % 2).float().unsqueeze(-1)",
        "inside": "y = y * self.context.keep",
    },
    "a mask in an attribute of a submodule": {
        "block_init": "self.mix.keep = None",
        "before_blocks": "keep = (tokens % 2).float().unsqueeze(-1)",
        "before_block": "block.mix.keep = keep",
        "inside": "y = y * self.mix.keep",
    },
    "a mask in an attribute of a class": {
        "before_blocks": "Block.keep = (tokens % 2).float().unsqueeze(-1)",
        "inside": "y = y * Block.keep",
    },
    "a mask in a list that blocks pop": {
        "top": "QUEUE = []",
        "before_block": "QUEUE.append((tokens % 2).float().unsqueeze(-1))",
        "inside": "y = y * QUEUE.pop()",
    },
    "a buffer that the forward fills for the blocks": {
        "block_init": 'self.register_buffer("scale", torch.ones(1), persistent=False)',
        "before_block": "block.scale.fill_(tokens[0, 0].item() / 8)",
        "inside": "y = y * self.scale",
    },
    "a block's output that a later block reads by reference": {
        "made": "for before, block in zip(model.blocks, list(model.blocks)[1:]):\n    block.before = [before]",
        "inside_first": 'y0 = self.before[0].out if hasattr(self, "before") else 0.0',
        "inside": "y = y + y0\nself.out = y",
    },
    "terms of the loss in a global list": {
        "top": "TERMS = []",
        "start": "TERMS.clear()",
        "inside": "TERMS.append(y.pow(2).mean())",
        "end": "+\nloss = loss + 0.1 * sum(TERMS)",
    },
    "terms of the loss in attributes of blocks": {
        "inside": "self.term = y.pow(2).mean()",
        "end": "+\nloss = loss + 0.1 * sum(block.term for block in self.blocks)",
    },
    "a dictionary that blocks change": {
        "before_blocks": 'state = {"depth": 0}',
        "block_parameters": "+, state",
        "block_arguments": "+, state",
        "inside": 'state["depth"] += 1\ny = y / state["depth"]',
    },
    "a list that blocks fill for the loss": {
        "before_blocks": "outputs = []",
        "block_parameters": "+, outputs",
        "block_arguments": "+, outputs",
        "inside": "outputs.append(y)",
        "end": "+\nloss = loss + 0.1 * sum(output.pow(2).mean() for output in outputs)",
    },
    "hidden states of all depths": {
        "before_blocks": "depths = [x]",
        "after_block": "depths.append(x)",
        "after_blocks": "x = sum(depths) / len(depths)",
    },
}

LASTING: dict[str, dict[str, str]] = {
    "a counter in blocks": {
        "block_init": "self.calls = 0",
        "inside": "self.calls += 1\ny = y * (1 + 0.2 * (self.calls % 3))",
    },
    "a counter in a global": {
        "top": "COUNTS = {}",
        "inside": "COUNTS[self.number] = COUNTS.get(self.number, 0) + 1\ny = y * (1 + 0.2 * (COUNTS[self.number] % 3))",
    },
    "a counter in the forward, before blocks": {
        "model_init": "self.calls = 0",
        "before_blocks": "self.calls += 1\nx = x * (1 + 0.2 * (self.calls % 3))",
    },
    "a counter in the forward, after blocks": {
        "model_init": "self.calls = 0",
        "after_blocks": "self.calls += 1\nx = x * (1 + 0.2 * (self.calls % 3))",
    },
    "a counter in a module before blocks": {
        "top": "class Counting(nn.Embedding):\n    calls = 0\n\n    def forward(self, tokens):\n"
        "        self.calls += 1\n        return super().forward(tokens) * (1 + 0.2 * (self.calls % 3))",
        "model_init": "self.embed = Counting(VOCABULARY, WIDTH)",
    },
    "a counter in a buffer of blocks": {
        "block_init": 'self.register_buffer("calls", torch.zeros(()))',
        "inside": "if self.training:\n    self.calls += 1\ny = y * (1 + 0.2 * (self.calls % 3))",
    },
    "a counter that training alone moves": {
        "block_init": "self.calls = 0",
        "inside": "self.calls += self.training\ny = y * (1 + 0.1 * self.calls)",
    },
    "a counter in an iterator": {
        "top": "import itertools",
        "block_init": "self.numbers = itertools.count()",
        "inside": "y = y * (1 + 0.1 * (next(self.numbers) % 5))",
    },
    "a moving average after a warm-up": {
        "block_init": 'self.register_buffer("mean", torch.zeros(WIDTH))\nself.calls = 0',
        "inside": "self.calls += self.training\nif self.training and self.calls > 3:\n"
        "    self.mean = 0.5 * self.mean + 0.5 * y.detach().mean((0, 1))\ny = y - self.mean",
    },
    "a moving average in place": {
        "block_init": 'self.register_buffer("mean", torch.zeros(WIDTH))',
        "inside": "if self.training:\n    self.mean.lerp_(y.detach().mean((0, 1)), 0.5)\ny = y - 0.5 * self.mean",
    },
    "a moving average that begins with some values": {
        "block_init": 'self.register_buffer("mean", torch.zeros(WIDTH))',
        "inside": "if self.training and y.detach().mean() > 0:\n"
        "    self.mean.lerp_(y.detach().mean((0, 1)), 0.5)\ny = y - 0.5 * self.mean",
    },
    "batch norms in blocks": {
        "block_init": "self.batch_norm = nn.BatchNorm1d(WIDTH)",
        "inside": "y = self.batch_norm(y.transpose(1, 2)).transpose(1, 2)",
    },
    "a batch norm before blocks": {
        "model_init": "self.batch_norm = nn.BatchNorm1d(WIDTH)",
        "before_blocks": "x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)",
    },
    "a table that is made when a length first comes": {
        "block_init": "self.table = None",
        "inside_first": "if self.table is None or len(self.table) < x.shape[1]:\n"
        "    self.table = torch.linspace(0, 1, x.shape[1]).unsqueeze(-1)",
        "inside": "y = y * self.table[: x.shape[1]]",
    },
    "a table by length in a dictionary of the model": {
        "model_init": "self.tables = {}",
        "before_blocks": "if x.shape[1] not in self.tables:\n"
        "    self.tables[x.shape[1]] = torch.linspace(0, 1, x.shape[1]).unsqueeze(-1)\n"
        "x = x + self.tables[x.shape[1]]",
    },
    "a table by length from a cached function": {
        "top": "import functools\n\n\n@functools.lru_cache\ndef table(length):\n"
        "    return torch.linspace(0, 1, length).unsqueeze(-1)",
        "inside": "y = y * table(x.shape[1])",
    },
    "a cache of the first values that come": {
        "block_init": "self.first = None",
        "inside": "if self.first is None:\n    self.first = y.detach().abs().mean()\ny = y / self.first",
    },
    "a cache of the first values that come before blocks": {
        "model_init": "self.first = None",
        "before_blocks": "if self.first is None:\n    self.first = tokens.float().mean()\nx = x * self.first / 8",
    },
    "a switch that a short input throws": {
        "model_init": 'self.kind = "long"',
        "before_blocks": 'if tokens.shape[1] < 5:\n    self.kind = "short"\nif self.kind == "short":\n    x = x * 2',
    },
    "a switch in blocks that a short input throws": {
        "block_init": 'self.kind = "long"',
        "inside": 'if x.shape[1] < 5:\n    self.kind = "short"\nif self.kind == "short":\n    y = y * 2',
    },
    "a module that is made at the first call": {
        "model_init": "self.late = None",
        "before_blocks": "if self.late is None:\n    self.late = nn.Identity()\n    x = x * 1\nx = self.late(x)",
    },
    "the last output kept on the model": {
        "model_init": "self.last = None",
        "before_blocks": "if self.last is not None:\n    x = x + 0.1 * self.last.mean()",
        "end": "+\nself.last = logits.detach()",
    },
    "a memory of the last hidden states in blocks": {
        "block_init": "self.memory = None",
        "inside": "if self.memory is not None:\n    y = y + 0.1 * self.memory.mean()\nself.memory = y.detach()",
    },
    "tensors of blocks that change in training": {
        "block_init": "self.scale = torch.ones(1)",
        "inside": "y = y * self.scale.clone()\nif self.training:\n    self.scale.mul_(1.1)",
    },
    "tensors in lists of blocks that change in training": {
        "block_init": "self.scales = [torch.ones(1)]",
        "inside": "y = y * self.scales[0].clone()\nif self.training:\n    self.scales[0].mul_(1.1)",
    },
    "tensors of blocks that are made in training": {
        "inside": "if self.training:\n    if not hasattr(self, 'scale'):\n        self.scale = torch.ones(1)\n"
        "    y = y * self.scale.clone()\n    self.scale.mul_(1.1)",
    },
    "a tensor of all blocks that changes in training": {
        "model_init": "self.scale = torch.ones(1)",
        "made": "for block in model.blocks:\n    block.scale = model.scale",
        "inside": "y = y * self.scale.clone()\nif self.training:\n    self.scale.mul_(1.1)",
    },
    "a tensor of the model that changes before blocks in training": {
        "model_init": "self.scale = torch.ones(1)",
        "before_blocks": "x = x * self.scale.clone()\nif self.training:\n    self.scale.mul_(1.1)",
    },
}

_BASE = {"model_init": "self.register_buffer('base', torch.ones(8))"}
_TAKEN = "for number, block in enumerate(model.blocks):\n    block.{}"
_SLICE = _TAKEN.format("register_buffer('scale', model.base[number : number + 1])")
VIEWS: dict[str, dict[str, str]] = {
    "views of a buffer that changes between steps": {
        **_BASE,
        "made": _SLICE,
        "inside": "y = y * self.scale",
        "before_step": "model.base.mul_(1.1)",
    },
    "views that change between steps and a buffer of all": {
        **_BASE,
        "made": _SLICE,
        "inside": "y = y * self.scale",
        "after_blocks": "x = x * self.base.mean()",
        "before_step": "for block in model.blocks:\n    block.scale.mul_(1.1)",
    },
    "views that blocks change": {
        **_BASE,
        "made": _SLICE,
        "inside": "y = y * self.scale.clone()\nif self.training:\n    self.scale.mul_(1.1)",
        "after_blocks": "x = x * self.base.mean()",
    },
    "views with common numbers": {
        "made": "base = torch.ones(8)\n" + _TAKEN.format("register_buffer('scale', base[number : number + 2])"),
        "inside": "y = y * self.scale.sum()",
        "before_step": "model.blocks[1].scale.mul_(1.1)",
    },
    "a buffer and its transpose": {
        "block_init": "self.register_buffer('one', torch.ones(WIDTH, WIDTH))\n"
        "self.register_buffer('other', self.one.t())",
        "inside": "y = y @ (self.one + self.other) / 16",
        "before_step": "for block in model.blocks:\n    block.one[0].mul_(1.1)",
    },
    "frozen views of a buffer": {
        **_BASE,
        "made": _TAKEN.format("scale = nn.Parameter(model.base[number : number + 1], requires_grad=False)"),
        "inside": "y = y * self.scale",
        "before_step": "model.base.mul_(1.1)",
    },
}
"""Tensors that share memory."""
