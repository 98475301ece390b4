"""Turns text into the tokenized dataset that pretrain_gpt.py reads.

    python launch/prepare_data.py                      # the documentation inside this Python installation
    python launch/prepare_data.py book.txt notes.txt   # your own text: one document per section between blank lines

The script writes three files: PREFIX.bin and PREFIX.idx (Megatron-core's indexed dataset) and PREFIX.tokenizer.json (a
byte-level BPE trained on the same text). The same input always gives the same files. Existing output is kept: delete it
to prepare it again.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_DOCUMENT = "<|endoftext|>"
FEWEST_DOCUMENTS = 20  # with fewer, 5 % may be no document, and then the dataset would wait forever
# The index comes last. If it exists, the other two files are complete.
OUTPUT_SUFFIXES = (".tokenizer.json", ".bin", ".idx")
# Folders of the standard library's tree that hold tests or other projects' packages.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def file_documents(paths: list[str]) -> Iterator[str]:
    """Yields the sections between blank lines of text files, in the given order."""
    for path in paths:
        sections = re.split(r"\n\s*\n", Path(path).read_text(encoding="utf-8"))
        yield from (section.strip() for section in sections if section.strip())


def python_documents() -> Iterator[str]:
    """Yields one document per help topic of Python, then one per standard library module with its docstrings."""
    from pydoc_data.topics import topics

    yield from (topics[name].strip() for name in sorted(topics))
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(library).parts):
            if docstrings := module_docstrings(path):
                yield "\n\n".join(docstrings)


def module_docstrings(path: Path) -> list[str]:
    """Returns the docstrings of a Python file. Parses the file, because importing it would run its code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer parsers warn about escape sequences in old files
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # a few files are templates or samples of broken code
            return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
    return [docstring for docstring in docstrings if docstring]


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE. It encodes any text, and decoding returns the same bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def write_dataset(documents: list[str], tokenizer: Tokenizer, prefix: str) -> int:
    """Writes PREFIX.bin, PREFIX.idx and PREFIX.tokenizer.json. Returns the number of tokens."""
    end_of_document = tokenizer.token_to_id(END_OF_DOCUMENT)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(tokenizer.get_vocab_size()))
    for encoding in tokenizer.encode_batch(documents):
        tokens = [*encoding.ids, end_of_document]
        builder.add_document(tokens, lengths=[len(tokens)])
    builder.finalize(f"{prefix}.idx")
    tokenizer.save(f"{prefix}.tokenizer.json")
    return sum(builder.sequence_lengths)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="UTF-8 text files (default: the documentation of Python itself)")
    parser.add_argument("--output-prefix", default="data/pydoc", help="path of the output files without their suffixes")
    parser.add_argument("--vocab-size", type=int, default=2048, help="number of tokens in the vocabulary")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    prefix = args.output_prefix
    if all(os.path.exists(prefix + suffix) for suffix in OUTPUT_SUFFIXES):
        print(f"{prefix}: already prepared")
        return
    documents = list(file_documents(args.files) if args.files else python_documents())
    if len(documents) < FEWEST_DOCUMENTS:
        raise SystemExit(f"found {len(documents)} documents, need {FEWEST_DOCUMENTS}; separate them by blank lines")
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(documents, args.vocab_size)
    # Writes under other names and renames, so that an interrupted run leaves no partial dataset.
    tokens = write_dataset(documents, tokenizer, f"{prefix}.partial")
    for suffix in OUTPUT_SUFFIXES:
        os.replace(f"{prefix}.partial{suffix}", f"{prefix}{suffix}")
    print(f"{prefix}: {len(documents)} documents, {tokens} tokens, vocabulary of {tokenizer.get_vocab_size()}")


if __name__ == "__main__":
    main()
