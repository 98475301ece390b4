"""Trains a SentenceTransformer on pairs of texts with its own Trainer:
``sentences.py --model_name_or_path DIR --data FILE`` and the arguments of the Trainer.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from transformers import HfArgumentParser


@dataclass
class Given:
    """What the Trainer's arguments do not say."""

    model_name_or_path: str
    data: str


def main() -> None:
    given, arguments = HfArgumentParser((Given, SentenceTransformerTrainingArguments)).parse_args_into_dataclasses()
    model = SentenceTransformer(given.model_name_or_path, device="cpu")
    rows = json.loads(Path(given.data).read_text())
    pairs = Dataset.from_list([{"anchor": row["instruction"], "positive": row["chosen"]} for row in rows])
    loss = losses.MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=pairs, loss=loss)
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)


if __name__ == "__main__":
    main()
