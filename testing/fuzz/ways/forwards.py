"""Ways in which forwards and blocks are built: values that steer Python, shared and odd parts, in-place operations."""

VALUES: dict[str, dict[str, str]] = {
    "an item steers before blocks": {"before_blocks": "if tokens.sum().item() % 2:\n    x = x * 0.5"},
    "hidden values steer before blocks": {"before_blocks": "if x.mean() > 0:\n    x = x * 0.5"},
    "values steer inside blocks": {"inside": "if y.mean() > 0:\n    y = y * 2"},
    "values steer after blocks": {"after_blocks": "if x.mean() > 0:\n    x = x * 0.5"},
    "values steer after the head": {"end": "+\nif tokens[0, 0] % 2 == 0:\n    loss = loss * 2"},
    "values choose the blocks": {"walk": "self.blocks[tokens[0, 0].item() % 2 :]"},
    "values skip a block": {"before_block": "if number == 1 and tokens[0, 0].item() % 2:\n    continue"},
    "values steer between blocks": {"after_block": "if tokens[0, number].item() % 2:\n    x = x * 0.5"},
    "an assertion looks at values before blocks": {"before_blocks": "assert not torch.isnan(x).any()"},
    "an assertion in a module before blocks": {
        "top": "class Checked(nn.Embedding):\n    def forward(self, tokens):\n        y = super().forward(tokens)\n"
        "        assert not torch.isnan(y).any()\n        return y",
        "model_init": "self.embed = Checked(VOCABULARY, WIDTH)",
    },
    "an item in a module before blocks": {
        "top": "class Scaling(nn.Embedding):\n    def forward(self, tokens):\n"
        "        return super().forward(tokens) / (1 + tokens.max().item())",
        "model_init": "self.embed = Scaling(VOCABULARY, WIDTH)",
    },
    "an assertion inside blocks": {"inside": "assert torch.isfinite(y).all()"},
    "a check of the range of tokens": {
        "start": 'if tokens.max() >= VOCABULARY:\n    raise ValueError("there is no such token")'
    },
    "a mask as an index before blocks": {"before_blocks": "x = x.clone()\nx[tokens == 0] = 0.0"},
    "a mask as an index in a module before blocks": {
        "top": "class Masking(nn.Embedding):\n    def forward(self, tokens):\n"
        "        y = super().forward(tokens).clone()\n"
        "        y[tokens < 4] = y[tokens >= 4].mean()\n        return y",
        "model_init": "self.embed = Masking(VOCABULARY, WIDTH)",
    },
    "a mask as an index after blocks": {
        "end": "chosen = targets != 0\nloss = F.cross_entropy(logits[chosen], targets[chosen])"
    },
    "positions from nonzero": {
        "before_blocks": "rows, columns = (tokens > 3).nonzero(as_tuple=True)\n"
        "x = x.index_put((rows, columns), torch.zeros(WIDTH))"
    },
    "a packed sequence before blocks": {
        "model_init": "self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)",
        "before_blocks": "lengths = torch.full((len(x),), x.shape[1])\n"
        "packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)\n"
        "x = x + nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)[0]",
    },
    "a loop as long as a value says": {
        "before_blocks": "for _ in range(int(tokens.max()) % 3):\n    x = torch.tanh(x)"
    },
    "a list of values": {
        "before_blocks": "x = x * torch.tensor([row[0] / 8 for row in tokens.tolist()])[:, None, None]"
    },
    "a number from values to blocks": {
        "before_blocks": "scale = tokens.float().mean().item() / 8",
        "block_parameters": "+, scale",
        "block_arguments": "+, scale",
        "inside": "y = y * scale",
    },
    "the mode steers": {
        "before_blocks": "if self.training:\n    x = x * 0.5",
        "inside": "if self.training:\n    y = y * 0.5",
    },
    "gradients steer": {"inside": "if torch.is_grad_enabled():\n    y = y * 0.5"},
}

SHARED: dict[str, dict[str, str]] = {
    "one norm for all blocks": {"made": "for block in model.blocks:\n    block.norm = model.blocks[0].norm"},
    "one activation with parameters for all blocks": {
        "model_init": "self.prelu = nn.PReLU(WIDTH)",
        "made": "for block in model.blocks:\n    block.prelu = model.prelu",
        "inside": "y = self.prelu(y.transpose(1, 2)).transpose(1, 2)",
    },
    "one dropout for all blocks": {
        "model_init": "self.dropout = nn.Dropout(0.0)",
        "made": "for block in model.blocks:\n    block.dropout = model.dropout",
        "before_blocks": "x = self.dropout(x)",
        "inside": "y = self.dropout(y)",
    },
    "one table for all blocks": {
        "top": "class Table(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        '        self.register_buffer("table", torch.linspace(0.5, 1, WIDTH))\n\n'
        "    def forward(self, y):\n        return y * self.table",
        "model_init": "self.table = Table()",
        "made": "for block in model.blocks:\n    block.table = model.table",
        "inside": "y = self.table(y)",
    },
    "the same block twice": {"made": "model.blocks[2] = model.blocks[0]"},
    "one block many times": {"walk": "[self.blocks[0]] * 3"},
    "the blocks twice": {"walk": "[*self.blocks, *self.blocks]"},
    "the blocks backwards": {"walk": "reversed(self.blocks)"},
    "the last block left out": {"walk": "self.blocks[:-1]"},
    "a tied head": {"made": "model.head.weight = model.embed.weight"},
    "the embedding used as the head": {
        "after_blocks": "x = x + 0.1 * F.linear(F.linear(x, self.embed.weight), self.embed.weight.t())"
    },
    "blocks with one weight": {"made": "model.blocks[2].mix.weight = model.blocks[0].mix.weight"},
    "a norm before blocks and after them": {
        "model_init": "self.norm = nn.LayerNorm(WIDTH)",
        "before_blocks": "x = self.norm(x)",
        "after_blocks": "x = self.norm(x)",
    },
    "an embedding of tokens and targets": {"after_blocks": "x = x + 0.1 * self.embed(tokens.roll(1, 1))"},
    "an embedding called twice": {"before_blocks": "x = x + 0.5 * self.embed(tokens.roll(1, 1))"},
    "a part called twice in a block": {"inside": "y = y + self.mix(self.norm(y))"},
    "a model of the model": {
        "top": "class Inner(nn.Module):\n    def __init__(self, blocks):\n        super().__init__()\n"
        "        self.blocks = blocks\n\n    def forward(self, x):\n        for block in self.blocks:\n"
        "            x = block(x)\n        return x",
        "made": "model.inner = Inner(model.blocks)\ndel model.blocks",
        "walk": "[self.inner]",
    },
}

HYBRID: dict[str, dict[str, str]] = {
    "every second block has a part more": {
        "block_init": "if number % 2:\n    self.more = nn.Linear(WIDTH, WIDTH)",
        "inside": "if self.number % 2:\n    y = y + self.more(y)",
    },
    "every second block keeps its state": {
        "top": "class Recurrent(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.linear, self.state = nn.Linear(WIDTH, WIDTH), None\n\n    def forward(self, x):\n"
        "        y = self.linear(x)\n        self.state = y[:, -1]\n        return y",
        "block_init": "self.more = Recurrent() if number % 2 else nn.Linear(WIDTH, WIDTH)",
        "inside": "y = y + self.more(y)",
    },
    "blocks of two classes": {
        "top": "class Other(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.linear = nn.Linear(WIDTH, WIDTH)\n\n    def forward(self, x, *rest, **named):\n"
        "        return x + F.silu(self.linear(x))",
        "made": "model.blocks[1] = Other()",
    },
    "an identity among the blocks": {
        "top": "class Same(nn.Module):\n    def forward(self, x, *rest, **named):\n        return x",
        "made": "model.blocks[1] = Same()",
    },
    "blocks get different arguments": {
        "before_blocks": "mask = (tokens % 2).float().unsqueeze(-1)",
        "block_parameters": "+, mask=None",
        "block_arguments": "+, **({'mask': mask} if number % 2 else {})",
        "inside": "y = y if mask is None else y * mask",
    },
    "blocks of different widths inside": {
        "block_init": "wide = 4 + number\n"
        "self.wide = nn.Sequential(nn.Linear(WIDTH, wide), nn.SiLU(), nn.Linear(wide, WIDTH))",
        "inside": "y = y + self.wide(y)",
    },
    "a block without parameters": {"made": "model.blocks[1].norm = model.blocks[1].mix = nn.Identity()"},
    "blocks that return tuples": {"block_return": "return x + y, y", "after_block": "x, rest = x"},
    "blocks that return tuples of which the last is used": {
        "block_return": "return x + y, y",
        "after_block": "x, rest = x",
        "after_blocks": "x = x + rest",
    },
    "blocks that pass something on": {
        "before_blocks": "rest = None",
        "block_parameters": "+, rest",
        "block_arguments": "+, rest",
        "inside": "y = y if rest is None else y + 0.1 * rest",
        "block_return": "return x + y, y",
        "after_block": "x, rest = x",
    },
    "blocks in an nn.Sequential": {
        "blocks": "nn.Sequential(*(Block(number) for number in range({count})))",
    },
    "blocks in an nn.Sequential called at once": {
        "blocks": "nn.Sequential(*(Block(number) for number in range({count})))",
        "walk": "[self.blocks]",
    },
    "blocks in an nn.ModuleDict": {
        "blocks": "nn.ModuleDict({f'block{number}': Block(number) for number in range({count})})",
        "walk": "self.blocks.values()",
    },
    "code between blocks": {
        "model_init": "self.mixes = nn.Parameter(torch.rand(8))",
        "before_blocks": "first = x",
        "before_block": "x = x + self.mixes[number] * first",
    },
    "code after every block": {"after_block": "x = x * 0.9"},
    "a copy of hidden states between blocks": {"after_block": "if number == 1:\n    x = x.detach() + 0.0 * x"},
    "blocks get what modules before them computed": {
        "model_init": "self.condition = nn.Linear(WIDTH, WIDTH)",
        "before_blocks": "condition = self.condition(x)",
        "block_parameters": "+, condition",
        "block_arguments": "+, condition",
        "inside": "y = y + condition",
    },
    "blocks with a checkpoint of their own": {
        "top": "from torch.utils.checkpoint import checkpoint",
        "inside": "y = checkpoint(lambda y: torch.tanh(self.mix(y)), y, use_reentrant=False)",
    },
    "a checkpoint around blocks": {
        "top": "from torch.utils.checkpoint import checkpoint",
        "model_init": "self.wrapped = lambda block: lambda *given, **named: "
        "checkpoint(block, *given, use_reentrant=False, **named)",
        "walk": "map(self.wrapped, self.blocks)",
    },
    "blocks in TorchScript": {"made": "for block in model.blocks:\n    block.mix = torch.jit.script(block.mix)"},
    "whole blocks in TorchScript": {
        "blocks": "nn.ModuleList(torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())) "
        "for number in range({count}))",
    },
}

IN_PLACE: dict[str, dict[str, str]] = {
    "added in place before blocks": {"before_blocks": "x += 1.0"},
    "added in place to a copy of a block's input": {"inside_first": "x = x.clone()\nx += 1.0"},
    "added in place to a block's first line": {"inside_first": "x = x.mul_(0.9)"},
    "multiplied in place between blocks": {"after_block": "x.mul_(0.9)"},
    "multiplied in place after blocks": {"after_blocks": "x.mul_(0.9)"},
    "multiplied in place inside blocks": {"inside": "y = (y + 0.0).mul_(0.9)"},
    "an index assigned before blocks": {"before_blocks": "x = x.clone()\nx[:, 0] = 0.0"},
    "an index assigned inside blocks": {"inside": "y = y.clone()\ny[:, 0] = 0.0"},
    "an index assigned between blocks": {"after_block": "x = x.clone()\nx[:, 0] = 0.0"},
    "logits divided in place": {
        "end": "logits.div_(2.0)\nloss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())"
    },
    "targets masked in place": {"start": "targets[targets == 0] = -100"},
    "tokens changed in place": {"start": "tokens.remainder_(7)"},
    "targets changed in place after blocks": {"after_blocks": "targets.add_(1).remainder_(VOCABULARY)"},
    "a view that is filled": {
        "before_blocks": "out = torch.empty_like(x)\nout[..., :4] = x[..., 4:]\nout[..., 4:] = x[..., :4]\nx = out"
    },
    "an operation with an output given": {
        "inside": "scale = torch.empty(WIDTH)\ntorch.linspace(0.5, 1, WIDTH, out=scale)\ny = y * scale"
    },
}
