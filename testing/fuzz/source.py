"""The text of a small script: a model of one's own and a loop that trains it, with slots that ways fill."""

from collections.abc import Iterable, Mapping
from typing import Any

TEMPLATE = '''\
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, VOCABULARY, STEPS, MICRO_BATCHES = 8, 16, 3, {micro_batches}

{top}


class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.norm, self.mix = number, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act = {act}
        {block_init}

    def forward(self, x{block_parameters}):
        {inside_first}
        y = self.act(self.mix(self.norm(x)))
        {inside}
        {block_return}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        {model_init}
        self.blocks = {blocks}

    def forward(self, {parameters}):
        {start}
        x = self.embed(tokens)
        {before_blocks}
        for number, block in enumerate({walk}):
            {before_block}
            x = block(x{block_arguments})
            {after_block}
        {after_blocks}
        logits = self.head(x)
        {end}
        {model_return}

    {methods}


def make():
    torch.manual_seed(0)
    model = Model()
    {made}
    return model


def batch(step, number, rank):
    draw = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    tokens = torch.randint(VOCABULARY, {shape}, generator=draw)
    return tokens, (tokens + tokens.roll(1, 1)) % VOCABULARY


def loss_of(engine, model, step, number, rank):
    tokens, targets = batch(step, number, rank)
    {before_call}
    output = engine({arguments})
    {unpack}
    return loss


def train(engine, model, ranks):
    """Trains with the micro-batches of these ranks. Returns the sums of their losses by step, and what else it saw."""
    seen = dict()
    {begin}
    for step in range(STEPS):
        {before_step}
        for number in range(MICRO_BATCHES):
            for rank in ranks:
                loss = loss_of(engine, model, step, number, rank)
                engine.backward({scaled})
                engine.step()
                seen[step, rank] = seen.get((step, rank), 0.0) + loss.item()
            {after_calls}
        {after_step}
    return seen
'''

DEFAULTS = {
    "act": "nn.Tanh()",
    "block_parameters": "",
    "block_return": "return x + y",
    "blocks": "nn.ModuleList(Block(number) for number in range({count}))",
    "parameters": "tokens, targets",
    "walk": "self.blocks",
    "block_arguments": "",
    "end": "loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())",
    "model_return": "return loss",
    "shape": "(2, 6)",
    "arguments": "tokens, targets",
    "unpack": "loss = output",
    "scaled": "loss",
}
"""What stands in a slot that no way fills. A way replaces these, but adds lines to other slots."""


def script(ways: Iterable[Mapping[str, str]], micro_batches: int, count: int) -> str:
    """Returns the script of a model of ``count`` blocks with these ways."""
    texts = dict(DEFAULTS)
    for slots in ways:
        for slot, text in slots.items():
            appends = slot in texts and (slot not in DEFAULTS or text.startswith("+"))
            texts[slot] = texts[slot] + ("" if slot in DEFAULTS else "\n") + text.removeprefix("+") if appends else text
    filled = {slot: text.replace("{count}", str(count)) for slot, text in texts.items()}
    filled["micro_batches"] = str(micro_batches)
    return "".join(_filled(line, filled) for line in TEMPLATE.splitlines(keepends=True))


def as_file(source: str, optimizer: str, config: dict[str, Any], ranks: int) -> str:
    """Returns a script that trains on so many ranks, or as one plain process for the data of all."""
    return (
        source
        + f"""

if __name__ == "__main__":
    # python FILE is the plain process; torchrun --standalone --nproc_per_node {ranks} -m ds_lgamp run FILE is ds_lgamp.
    import os

    model = make()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.{optimizer}
    if "RANK" in os.environ:
        import deepspeed

        deepspeed.init_distributed("gloo")
        ranks, config = [int(os.environ["RANK"])], {config}
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    else:
        from testing.fuzz.plain import Plain

        ranks = list(range({ranks}))
        engine = Plain(model, optimizer, MICRO_BATCHES * {ranks}, 1, {config["gradient_clipping"]})
    engine.train()
    print(train(engine, model, ranks))
"""
    )


def _filled(line: str, texts: Mapping[str, str]) -> str:
    """Fills a line of the template. One that is a slot alone becomes as many lines as its text has."""
    name = line.strip()[1:-1]
    if line.strip() != f"{{{name}}}" or not name.isidentifier():
        for slot in _slots(line):
            line = line.replace(f"{{{slot}}}", texts.get(slot, ""))
        return line
    indent = line[: len(line) - len(line.lstrip())]
    return "".join(f"{indent}{text}\n" for text in texts.get(name, "").splitlines())


def _slots(line: str) -> list[str]:
    return [part.split("}")[0] for part in line.split("{")[1:] if part.split("}")[0].isidentifier()]
