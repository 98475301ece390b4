"""Damaged checkpoint files: refused by name, or of the values that were written."""

import json
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.checkpoint.whole import read_whole, verify
from testing.checkpoints import content, flip, forge_index, forge_state
from testing.fuzz.outcome import Outcome, sentence_fault

STRANGE: tuple[Any, ...] = (None, True, -1, 0, 2**63, 1e308, float("nan"), "", "x" * 5000, "../x", [], [[]], {}, [0])
"""Values that stand in for others."""


def flip_bits(random: Random, checkpoint: Path) -> str:
    path = _file(random, checkpoint)
    for _ in range(random.choice((1, 1, 3))):
        flip(path, random.randrange(path.stat().st_size), random.randrange(8))
    return f"flipped bits of {path.name}"


def truncate(random: Random, checkpoint: Path) -> str:
    path = _file(random, checkpoint)
    kept = random.choice((0, random.randrange(path.stat().st_size)))
    path.write_bytes(path.read_bytes()[:kept])
    return f"kept {kept} bytes of {path.name}"


def extend(random: Random, checkpoint: Path) -> str:
    path = _file(random, checkpoint)
    path.write_bytes(path.read_bytes() + random.randbytes(random.randint(1, 64)))
    return f"added bytes to {path.name}"


def remove(random: Random, checkpoint: Path) -> str:
    path = _file(random, checkpoint)
    path.unlink()
    return f"removed {path.name}"


def swap(random: Random, checkpoint: Path) -> str:
    first, second = random.sample(_files(checkpoint), 2)
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    return f"swapped {first.name} and {second.name}"


def replace_by_folder(random: Random, checkpoint: Path) -> str:
    path = _file(random, checkpoint)
    path.unlink()
    path.mkdir()
    return f"made {path.name} a folder"


def alter_json(random: Random, checkpoint: Path) -> str:
    """Alters one entry of a file, whose checksum no longer fits."""
    path = random.choice([path for path in _files(checkpoint) if path.suffix == ".json"])
    value = json.loads(path.read_text())
    said = _alter(random, value)
    path.write_text(json.dumps(value))
    return f"{said} in {path.name}"


def forge(random: Random, checkpoint: Path) -> str:
    """Alters one entry, and corrects the checksums: only its meaning can give it away."""
    said: list[str] = []
    forged = random.choice((forge_state, forge_index))
    forged(checkpoint, lambda value: said.append(_alter(random, value)))
    return f"{said[0]} with {forged.__name__}"


MUTATIONS: tuple[Callable[[Random, Path], str], ...] = (
    flip_bits,
    flip_bits,
    truncate,
    extend,
    remove,
    swap,
    replace_by_folder,
    alter_json,
    forge,
    forge,
)


def run_case(random: Random, original: Path, expected: str, folder: Path) -> Outcome:
    """Damages a copy of ``original``, whose content is ``expected``, inside ``folder``."""
    copy = folder / "copy"
    shutil.copytree(original, copy)
    mutate = random.choice(MUTATIONS)
    said = f"{mutate.__name__} failed"
    try:
        said = mutate(random, copy)
        return _outcome(copy, expected, said, forged=mutate is forge)
    except Exception:
        return Outcome("defect", f"{said}\n{traceback.format_exc(limit=-4)}")
    finally:
        shutil.rmtree(copy)


def _outcome(copy: Path, expected: str, said: str, forged: bool) -> Outcome:
    try:
        verify(copy)
        found = content(read_whole(copy))
    except CheckpointError as error:
        fault = sentence_fault(str(error))
        return Outcome("refused") if fault is None else Outcome(f"defect: {fault}", f"{said}: {error}")
    if found == expected:
        return Outcome("harmless")
    # Whoever corrects all checksums has written another checkpoint.
    return Outcome("another checkpoint") if forged else Outcome("defect: other values", said)


def _files(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size)


def _file(random: Random, checkpoint: Path) -> Path:
    return random.choice(_files(checkpoint))


def _alter(random: Random, value: Any) -> str:
    """Alters one entry of a nest of objects and lists, in place. Returns what it did."""
    path: list[Any] = []
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = random.choice(keys)
        path.append(key)
        inner = value[key]
        if not isinstance(inner, (dict, list)) or not inner or random.random() < 0.2:
            break
        value = inner
    name = "/".join(map(str, path))
    act = random.choice(("replace", "replace", "remove", "add"))
    if act == "remove":
        del value[key]
        return f"removed {name}"
    if act == "add" and isinstance(value, dict):
        value[f"{key}x"] = inner
        return f"doubled {name}"
    strange = random.choice(STRANGE)
    value[key] = strange
    return f"set {name} to {str(strange)[:40]!r}"
