"""Turns text into the tokenized dataset that pretrain_gpt.py or pretrain_bert.py reads.

    python launch/prepare_data.py                      # the documentation inside this Python installation
    python launch/prepare_data.py book.txt notes.txt   # your own text: one document per section between blank lines
    python launch/prepare_data.py --bert book.txt      # for BERT

The script writes three files: PREFIX.bin and PREFIX.idx (Megatron-core's indexed dataset) and PREFIX.tokenizer.json (a
byte-level BPE trained on the same text). With --bert it writes a folder PREFIX.bert: pairs of segments in shards, and a
WordPiece. The same input always gives the same files. Existing output is kept: delete it to prepare it again.
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

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_DOCUMENT = "<|endoftext|>"
FEWEST_DOCUMENTS = 20  # with fewer, 5 % may be no document, and then the dataset would wait forever
# The index comes last. If it exists, the other two files are complete.
OUTPUT_SUFFIXES = (".tokenizer.json", ".bin", ".idx")
# Folders of the standard library's tree that hold tests or other projects' packages.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def documents_by_source(files: list[str]) -> dict[str, list[str]]:
    """Returns the documents of every text file, by its path; without files, those inside this Python installation."""
    if files:
        return {file: list(file_documents(file)) for file in files}
    return {"topics": list(topic_documents()), "library": list(library_documents())}


def file_documents(path: str) -> Iterator[str]:
    """Yields the sections between blank lines of a text file."""
    sections = re.split(r"\n\s*\n", Path(path).read_text(encoding="utf-8"))
    yield from (section.strip() for section in sections if section.strip())


def topic_documents() -> Iterator[str]:
    """Yields one document per help topic of Python."""
    from pydoc_data.topics import topics

    yield from (topics[name].strip() for name in sorted(topics))


def library_documents() -> Iterator[str]:
    """Yields one document per standard library module with docstrings."""
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
    # Here, because BERT's data do without Megatron-core.
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

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
    bert = parser.add_argument_group("BERT")
    bert.add_argument("--bert", action="store_true", help="write pairs of segments for pretrain_bert.py")
    bert.add_argument("--tokenizer", type=Path, help="a WordPiece: tokenizer.json or vocab.txt (default: train one)")
    bert.add_argument("--sequence-lengths", type=int, nargs="+", default=[128, 512], help="tokens of a pair, by phase")
    bert.add_argument("--shards", type=int, default=16, help="files per phase; use a multiple of the number of ranks")
    bert.add_argument("--seed", type=int, default=1234, help="of pairs and their order")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    prefix = args.output_prefix
    outputs = [f"{prefix}.bert"] if args.bert else [prefix + suffix for suffix in OUTPUT_SUFFIXES]
    if all(map(os.path.exists, outputs)):
        print(f"{prefix}: already prepared")
        return
    sources = documents_by_source(args.files)
    documents = [document for each in sources.values() for document in each]
    if len(documents) < FEWEST_DOCUMENTS:
        raise SystemExit(f"found {len(documents)} documents, need {FEWEST_DOCUMENTS}; separate them by blank lines")
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    if args.bert:
        # Here, because it is the folder of this script, which others import.
        from bert_pairs import prepare, read_tokenizer, wordpiece

        words = read_tokenizer(args.tokenizer) if args.tokenizer else wordpiece(documents, args.vocab_size)
        summary = prepare(sources, Path(outputs[0]), words, args.sequence_lengths, args.shards, args.seed)
        print(f"{outputs[0]}: {summary}")
        return
    tokenizer = train_tokenizer(documents, args.vocab_size)
    # Writes under other names and renames, so that an interrupted run leaves no partial dataset.
    tokens = write_dataset(documents, tokenizer, f"{prefix}.partial")
    for suffix in OUTPUT_SUFFIXES:
        os.replace(f"{prefix}.partial{suffix}", f"{prefix}{suffix}")
    print(f"{prefix}: {len(documents)} documents, {tokens} tokens, vocabulary of {tokenizer.get_vocab_size()}")


if __name__ == "__main__":
    main()
