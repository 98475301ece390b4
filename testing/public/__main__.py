"""Runs unedited public code with and without a ds_lgamp block and prints a table. Exits with 1 if a result differs or
fails."""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from testing.public import (
    accelerate_scripts,
    deepspeed_examples,
    deepspeed_tests,
    gpt_neox,
    megatron_deepspeed,
    megatron_lm,
    openrlhf,
    stacks,
    transformers_scripts,
    transpeeder,
    trl_scripts,
)
from testing.public.outcome import Case, Outcome, commit_of, markdown, outcomes, to_json

PACKAGES = ("torch", "deepspeed", "megatron-core", "transformers", "accelerate")


class Part(NamedTuple):
    """A tree, or an environment that has a package, and its cases."""

    material: str
    variable: str
    """Environment variable that names the tree if no option does."""
    needed: str
    """A file that identifies the tree."""
    cases: Callable[[Path, Path], Iterable[Case]]
    """Makes the cases, given the tree and a folder to write into."""
    version: Callable[[Path], str] = commit_of


PARTS = {
    "deepspeed": Part("DeepSpeed's tests", "DEEPSPEED_PATH", "tests/unit/common.py", deepspeed_tests.cases),
    "deepspeed-examples": Part(
        "DeepSpeedExamples' pipeline_parallelism/train.py",
        "DEEPSPEED_EXAMPLES_PATH",
        "training/pipeline_parallelism/train.py",
        deepspeed_examples.cases,
    ),
    "megatron-deepspeed": Part(
        "Megatron-DeepSpeed's pretrain_gpt.py", "MEGATRON_DEEPSPEED_PATH", "pretrain_gpt.py", megatron_deepspeed.cases
    ),
    "gpt-neox": Part("GPT-NeoX's train.py", "GPT_NEOX_PATH", "deepy.py", gpt_neox.cases),
    "transpeeder": Part("transpeeder's train.py", "TRANSPEEDER_PATH", "scripts/convert2ckpt.py", transpeeder.cases),
    "megatron-lm": Part("Megatron-LM's pretrain_gpt.py", "MEGATRON_LM_PATH", "pretrain_gpt.py", megatron_lm.cases),
    "transformers": Part(
        "transformers' run_clm.py and run_mlm.py",
        "TRANSFORMERS_PATH",
        "examples/pytorch/language-modeling/run_clm.py",
        transformers_scripts.trainer_cases,
    ),
    "accelerate": Part(
        "Accelerate's deepspeed_with_config_support.py",
        "ACCELERATE_PATH",
        "examples/by_feature/deepspeed_with_config_support.py",
        transformers_scripts.loop_cases,
    ),
    "accelerate-examples": Part(
        "Accelerate's nlp_example.py and complete_nlp_example.py",
        "ACCELERATE_PATH",
        "examples/complete_nlp_example.py",
        accelerate_scripts.cases,
    ),
    "trl": Part(
        "trl's sft.py, dpo.py, kto.py and reward.py",
        "TRL_PATH",
        "trl/scripts/dpo.py",
        trl_scripts.cases,
        trl_scripts.version_of,
    ),
    "openrlhf": Part(
        "openrlhf",
        "OPENRLHF_ENVIRONMENT",
        "bin/python",
        openrlhf.cases,
        partial(stacks.version_of, "openrlhf"),
    ),
    **{
        name: Part(
            stack.package,
            f"{name.replace('-', '_').upper()}_ENVIRONMENT",
            f"bin/{stack.launcher}",
            partial(stacks.cases, stack),
            partial(stacks.version_of, stack.package),
        )
        for name, stack in stacks.STACKS.items()
    },
}


def main(words: Sequence[str] | None = None) -> int:
    """Runs the selected parts. Returns 1 if anything differs or fails, else 0."""
    options = parse(words)
    command = " ".join(["python -m testing.public", *_without_paths(options)])
    versions = {package: version(package) for package in PACKAGES}
    found: list[Outcome] = []
    for name in options.only or PARTS:
        for outcome in run_part(name, getattr(options, name.replace("-", "_")), options.matching):
            print(f"{outcome.material}: {outcome.configuration}: {outcome.result}", file=sys.stderr, flush=True)
            found.append(outcome)
            if options.json is not None:
                # After each, because all take hours, and a run may be ended sooner.
                options.json.write_text(to_json(found, command, versions))
    print(markdown(found))
    return int(any(outcome.bad for outcome in found))


def run_part(name: str, tree: Path | None, matching: str = "") -> Iterable[Outcome]:
    """Yields the outcomes of one tree for the configurations that contain ``matching``."""
    part = PARTS[name]
    lack = f"no tree; give --{name} or {part.variable}"
    if tree is not None and not (tree / part.needed).exists():
        tree, lack = None, f"the given folder has no {part.needed}"
    with tempfile.TemporaryDirectory() as folder:
        cases = [] if tree is None else part.cases(tree, Path(folder))
        chosen = [case for case in cases if matching in case.configuration]
        yield from outcomes(part.material, None if tree is None else part.version(tree), chosen, lack)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m testing.public", description=__doc__)
    for name, part in PARTS.items():
        parser.add_argument(
            f"--{name}",
            type=Path,
            metavar="DIR",
            default=os.environ.get(part.variable) or None,
            help=f"tree of {part.material} (default: the variable {part.variable})",
        )
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts to run (default: all)")
    parser.add_argument("--matching", default="", help="run only configurations whose names contain these words")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes to this file")
    options = parser.parse_args(words)
    for name in PARTS:
        tree = getattr(options, name.replace("-", "_"))
        if tree is not None:
            setattr(options, name.replace("-", "_"), Path(tree).resolve())
    return options


def _without_paths(options: argparse.Namespace) -> list[str]:
    """Returns the options without paths, because the page should not depend on one machine."""
    words = [f"--{name} DIR" for name in PARTS if getattr(options, name.replace("-", "_")) is not None]
    words += ["--only", *options.only] if options.only else []
    return [*words, *(["--matching", f"'{options.matching}'"] if options.matching else [])]


if __name__ == "__main__":
    sys.exit(main())
