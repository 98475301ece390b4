"""Ways in which loops differ from a plain one, with what models need for them."""

_DICTIONARY = {
    "start": 'tokens, targets = features["tokens"], features["targets"]',
    "parameters": "features",
    "methods": "@property\ndef dummy_inputs(self):\n    tokens = torch.zeros(1, 4, dtype=torch.long)\n"
    '    return {"features": {"tokens": tokens, "targets": tokens}}',
}
_LIST = {
    "start": "tokens, targets = given",
    "parameters": "given",
    "methods": "@property\ndef dummy_inputs(self):\n    tokens = torch.zeros(1, 4, dtype=torch.long)\n"
    '    return {"given": [tokens, tokens]}',
}


def _evaluated(number: str, called: str = "engine") -> str:
    return (
        f"with torch.no_grad():\n    for rank in ranks:\n"
        f"        loss = loss_of({called}, model, step, 50 + {number}, rank)\n"
        f'        seen["evaluation", step, {number}, rank] = loss.item()'
    )


_EVALUATED = f"engine.eval()\n{_evaluated('number')}\nengine.train()"
_EVALUATED_STEP = f"engine.eval()\n{_evaluated('0')}\nengine.train()"

CONTAINERS: dict[str, dict[str, str]] = {
    "a new dictionary for every call": {**_DICTIONARY, "arguments": '{"tokens": tokens, "targets": targets}'},
    "a dictionary refilled for every call": {
        **_DICTIONARY,
        "top": "FEED = {}",
        "before_call": "FEED.update(tokens=tokens, targets=targets)",
        "arguments": "FEED",
    },
    "a dictionary emptied after every call": {
        **_DICTIONARY,
        "before_call": 'feed = {"tokens": tokens, "targets": targets}',
        "arguments": "feed",
        "unpack": "loss = output\nfeed.clear()",
    },
    "a forward that writes into its dictionary": {
        **_DICTIONARY,
        "before_blocks": 'features["embedded"] = x',
        "arguments": '{"tokens": tokens, "targets": targets}',
    },
    "a forward that writes into its dictionary and reads it": {
        **_DICTIONARY,
        "before_blocks": 'features["embedded"] = x',
        "after_blocks": 'x = x + features["embedded"]',
        "arguments": '{"tokens": tokens, "targets": targets}',
    },
    "a forward that pops from its dictionary": {
        **_DICTIONARY,
        "start": 'tokens = features["tokens"]\ntargets = features.pop("targets")',
        "arguments": '{"tokens": tokens, "targets": targets}',
    },
    "a list for every call": {**_LIST, "arguments": "[tokens, targets]"},
    "a list cleared for every call": {
        **_LIST,
        "top": "GIVEN = []",
        "before_call": "GIVEN.clear()\nGIVEN.extend((tokens, targets))",
        "arguments": "GIVEN",
    },
    "an object whose attributes change": {
        **_LIST,
        "top": "class Batch:\n    pass\n\n\nBATCH = Batch()",
        "start": "tokens, targets = given.tokens, given.targets",
        "methods": "@property\ndef dummy_inputs(self):\n    tokens = torch.zeros(1, 4, dtype=torch.long)\n"
        "    made = Batch()\n    made.tokens = made.targets = tokens\n"
        '    return {"given": made}',
        "before_call": "BATCH.tokens, BATCH.targets = tokens, targets",
        "arguments": "BATCH",
    },
    "tensors refilled for every call": {
        "top": "BUFFER = torch.zeros(2, 6, dtype=torch.long)",
        "before_call": "BUFFER.copy_(tokens)",
        "arguments": "BUFFER, targets",
    },
    "tensors emptied after every call": {
        "top": "GIVEN = []",
        "before_call": "GIVEN.extend((tokens, targets))",
        "after_calls": "while GIVEN:\n    GIVEN.pop().zero_()",
    },
    "arguments by name": {"arguments": "targets=targets, tokens=tokens"},
    "keywords refilled for every call": {
        "top": "NAMED = {}",
        "before_call": "NAMED.update(tokens=tokens, targets=targets)",
        "arguments": "**NAMED",
    },
    "an optional argument": {
        "parameters": "+, scale=None",
        "before_blocks": "if scale is not None:\n    x = x * scale",
        "arguments": "+, *([0.5] if number % 2 else [])",
    },
    "a number that changes": {
        "parameters": "+, scale=1.0",
        "before_blocks": "x = x * scale",
        "arguments": "+, scale=1.0 + number",
    },
    "a number as a tensor": {
        "parameters": "+, scale=None",
        "before_blocks": "if scale is not None:\n    x = x * scale",
        "arguments": "+, scale=torch.tensor(1.0 + number)",
    },
    "a tensor with a gradient of the script": {
        "parameters": "+, offset=None",
        "before_blocks": "if offset is not None:\n    x = x + offset",
        "arguments": "+, offset=0.1 * torch.ones(WIDTH)",
    },
    "a flag that changes": {
        "parameters": "+, double=False",
        "before_blocks": "if double:\n    x = x * 2",
        "arguments": "+, double=number % 2 == 1",
    },
    "a word that changes": {
        "parameters": '+, kind="tanh"',
        "before_blocks": "x = getattr(torch, kind)(x)",
        "arguments": '+, kind=("tanh", "sigmoid")[number % 2]',
    },
    "a mask for blocks": {
        "parameters": "+, mask=None",
        "block_parameters": "+, mask=None",
        "block_arguments": "+, mask",
        "inside": "y = y if mask is None else y * mask",
        "arguments": "+, mask=(tokens % 2).float().unsqueeze(-1)",
    },
    "a list of masks for blocks": {
        "parameters": "+, masks=None",
        "block_parameters": "+, mask=None",
        "block_arguments": "+, masks[number] if masks else None",
        "inside": "y = y if mask is None else y * mask",
        "arguments": "+, masks=[(tokens % (2 + number)).float().unsqueeze(-1) for number in range(8)]",
    },
    "a function as an argument": {
        "parameters": "+, function=None",
        "before_blocks": "if function:\n    x = function(x)",
        "arguments": "+, function=torch.tanh",
    },
    "more arguments than names": {"parameters": "tokens, *rest", "start": "targets = rest[0] if rest else tokens"},
    "arguments by any name": {
        "parameters": "tokens, targets, **named",
        "before_blocks": 'x = x * named.get("scale", 1.0)',
        "arguments": "tokens, targets, scale=1.0 + number",
    },
}

SHAPES: dict[str, dict[str, str]] = {
    "lengths by micro-batch": {"shape": "(2, 6 + 2 * (number % 2))"},
    "lengths by step": {"shape": "(2, 6 + step)"},
    "lengths by rank": {"shape": "(2, 6 + rank)"},
    "short lengths": {"shape": "(2, 3 + number % 3)"},
    "rows by micro-batch": {"shape": "(2 + number % 2, 6)"},
    "rows by rank": {"shape": "(2 + rank, 6)"},
    "one row": {"shape": "(1, 6)"},
    "one token": {"shape": "(2, 1)"},
}

SETTINGS: dict[str, dict[str, str]] = {
    "a temperature by micro-batch": {
        "model_init": "self.temperature = 1.0",
        "end": "+\nloss = loss * self.temperature",
        "before_call": "model.temperature = 1.0 + number",
    },
    "a temperature by step": {
        "model_init": "self.temperature = 1.0",
        "end": "+\nloss = loss * self.temperature",
        "before_step": "model.temperature = 1.0 + step",
    },
    "a temperature before blocks by step": {
        "model_init": "self.temperature = 1.0",
        "before_blocks": "x = x * self.temperature",
        "before_step": "model.temperature = 1.0 + step",
    },
    "a temperature after every call": {
        "model_init": "self.temperature = 1.0",
        "end": "+\nloss = loss * self.temperature",
        "after_calls": "model.temperature += 0.5",
    },
    "a scale of blocks by micro-batch": {
        "block_init": "self.scale = 1.0",
        "inside": "y = y * self.scale",
        "before_call": "for block in model.blocks:\n    block.scale = 1.0 + number",
    },
    "a scale of blocks by step": {
        "block_init": "self.scale = 1.0",
        "inside": "y = y * self.scale",
        "before_step": "for block in model.blocks:\n    block.scale = 1.0 + step",
    },
    "a setting in an object by micro-batch": {
        "top": "class Config:\n    scale = 1.0",
        "model_init": "self.config = Config()",
        "before_blocks": "x = x * self.config.scale",
        "before_call": "model.config.scale = 1.0 + number",
    },
    "a setting in a dictionary by micro-batch": {
        "model_init": 'self.config = {"scale": 1.0}',
        "before_blocks": 'x = x * self.config["scale"]',
        "before_call": 'model.config["scale"] = 1.0 + number',
    },
    "a setting in a list of blocks by micro-batch": {
        "block_init": "self.scales = [1.0]",
        "inside": "y = y * self.scales[0]",
        "before_call": "for block in model.blocks:\n    block.scales[0] = 1.0 + number",
    },
    "a setting in a global by micro-batch": {
        "top": "SETTINGS = {'scale': 1.0}",
        "before_blocks": "x = x * SETTINGS['scale']",
        "before_call": "SETTINGS['scale'] = 1.0 + number",
    },
    "a setting in a global by step": {
        "top": "SETTINGS = {'scale': 1.0}",
        "inside": "y = y * SETTINGS['scale']",
        "before_step": "SETTINGS['scale'] = 1.0 + step",
    },
    "a setting in a class by micro-batch": {
        "inside": 'y = y * getattr(Block, "scale", 1.0)',
        "before_call": "Block.scale = 1.0 + number",
    },
    "a flag by micro-batch": {
        "model_init": "self.doubles = False",
        "before_blocks": "if self.doubles:\n    x = x * 2",
        "before_call": "model.doubles = number % 2 == 1",
    },
    "a depth by step": {
        "model_init": "self.depth = 2",
        "walk": "self.blocks[: self.depth]",
        "before_step": "model.depth = 1 + step",
    },
    "a function by micro-batch": {
        "model_init": "self.function = torch.tanh",
        "before_blocks": "x = self.function(x)",
        "before_call": "model.function = (torch.tanh, torch.sigmoid)[number % 2]",
    },
    "an activation by step": {
        "before_step": "for block in model.blocks:\n    block.act = (nn.Tanh(), nn.Sigmoid())[step % 2]"
    },
    "a dropout on or off by micro-batch": {
        "block_init": "self.dropout = nn.Dropout(0.0)",
        "inside": "y = self.dropout(y)",
        "before_call": "for block in model.blocks:\n    block.dropout.p = float(number % 2)",
    },
    "a dropout on or off by step": {
        "model_init": "self.dropout = nn.Dropout(0.0)",
        "before_blocks": "x = x + self.dropout(x)",
        "before_step": "model.dropout.p = float(step % 2)",
    },
    "a slope of activations by micro-batch": {
        "act": "nn.LeakyReLU(0.1)",
        "before_call": "for block in model.blocks:\n    block.act.negative_slope = 0.1 * (1 + number)",
    },
    "a part that evaluates": {
        "block_init": "self.batch_norm = nn.BatchNorm1d(WIDTH)",
        "inside": "y = self.batch_norm(y.transpose(1, 2)).transpose(1, 2)",
        "begin": "model.blocks[0].eval()",
    },
    "a part that evaluates in some steps": {
        "block_init": "self.batch_norm = nn.BatchNorm1d(WIDTH)",
        "inside": "y = self.batch_norm(y.transpose(1, 2)).transpose(1, 2)",
        "before_step": "engine.train()\nif step == 1:\n    model.blocks[0].eval()",
    },
    "a part that evaluates in some micro-batches": {
        "before_blocks": "if self.embed.training:\n    x = x * 0.5",
        "before_call": "model.embed.train(number % 2 == 0)",
    },
    "a buffer by micro-batch": {
        "block_init": 'self.register_buffer("scale", torch.ones(1))',
        "inside": "y = y * self.scale",
        "before_call": "for block in model.blocks:\n    block.scale.fill_(1.0 + number)",
    },
    "a buffer by step": {
        "model_init": 'self.register_buffer("scale", torch.ones(1))',
        "before_blocks": "x = x * self.scale",
        "before_step": "model.scale.fill_(1.0 + step)",
    },
    "a new buffer by step": {
        "model_init": 'self.register_buffer("scale", torch.ones(1))',
        "before_blocks": "x = x * self.scale",
        "before_step": "model.scale = torch.ones(1) * (1.0 + step)",
    },
    "a tensor attribute by micro-batch": {
        "model_init": "self.scale = torch.ones(1)",
        "before_blocks": "x = x * self.scale",
        "before_call": "model.scale = torch.ones(1) * (1.0 + number)",
    },
    "a tensor attribute by step in blocks": {
        "block_init": "self.scale = torch.ones(1)",
        "inside": "y = y * self.scale",
        "before_step": "for block in model.blocks:\n    block.scale = torch.ones(1) * (1.0 + step)",
    },
    "a learning rate by step": {
        "before_step": 'for group in engine.optimizer.param_groups:\n    group["lr"] = 0.02 * (1 + step)'
    },
    "a layer frozen in the middle": {"before_step": "if step == 1:\n    model.blocks[0].requires_grad_(False)"},
    "a layer frozen for some micro-batches": {"before_call": "model.embed.requires_grad_(number % 2 == 0)"},
    "a hook in the middle": {
        "before_step": "if step == 1:\n"
        "    model.blocks[0].register_forward_hook(lambda module, given, output: output * 0.9)"
    },
    "a number that the forward leaves for the loss": {
        "model_init": "self.mean = 1.0",
        "start": "self.mean = tokens.float().mean().item()",
        "unpack": "loss = output * model.mean / 8",
        # On several the engine warns that the script finds numbers of other micro-batches there.
        "pipeline_ranks": "1",
    },
}

BETWEEN: dict[str, dict[str, str]] = {
    "evaluation after every call": {"after_calls": _EVALUATED},
    "evaluation after every step": {"after_step": _EVALUATED_STEP},
    "evaluation before training": {"begin": f"step = 0\n{_EVALUATED_STEP}"},
    "the model called after every step": {"after_step": _evaluated("0", "model")},
    "an evaluation that fails": {
        "after_step": "engine.eval()\ntry:\n    with torch.no_grad():\n"
        "        engine(torch.full((2, 6), VOCABULARY), None)\n"
        "except Exception as error:\n    seen['failed', 'evaluation', step] = 1.0\nengine.train()",
    },
    "an evaluation that the model refuses": {
        "start": 'if tokens.shape[1] > 20:\n    raise ValueError("the sequence is too long")',
        "after_step": "engine.eval()\ntry:\n    with torch.no_grad():\n"
        "        tokens = torch.zeros(2, 30, dtype=torch.long)\n        engine(tokens, tokens)\n"
        "except ValueError:\n    seen['failed', 'evaluation', step] = 1.0\nengine.train()",
    },
    "a micro-batch that the model refuses": {
        "start": 'if tokens.shape[1] > 20:\n    raise ValueError("the sequence is too long")',
        "before_step": "try:\n    tokens = torch.zeros(2, 30, dtype=torch.long)\n    engine(tokens, tokens)\n"
        "except ValueError:\n    seen['failed', 'training', step] = 1.0",
    },
    "a model in evaluation that refuses inside a block": {
        "inside": 'if x.shape[1] > 20:\n    raise ValueError("the sequence is too long")',
        "after_step": "engine.eval()\ntry:\n    with torch.no_grad():\n"
        "        tokens = torch.zeros(2, 30, dtype=torch.long)\n        engine(tokens, tokens)\n"
        "except ValueError:\n    seen['failed', 'evaluation', step] = 1.0\nengine.train()",
    },
    "an exception of the loop": {
        "after_calls": "try:\n    raise StopIteration\nexcept StopIteration:\n    pass",
    },
    "an evaluation that the loop breaks off": {
        "after_step": "engine.eval()\ntry:\n    with torch.no_grad():\n"
        "        for rank in ranks:\n            loss_of(engine, model, step, 50, rank)\n        raise KeyError\n"
        "except KeyError:\n    pass\nengine.train()",
    },
    "training mode set in every step": {"before_step": "engine.train()"},
    "the state read after every step": {"after_step": "state = model.state_dict()"},
    "gradients set to zero after every step": {"after_step": "engine.optimizer.zero_grad()"},
    "calls without gradients after every step": {"after_step": _evaluated("0")},
    "random numbers drawn in between": {"after_calls": "torch.rand(3)"},
}
