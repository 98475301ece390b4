"""``ds_lgamp env`` prints the installed versions and the obstacles to a run."""

import importlib.metadata
import io
import json
import re
import subprocess
import sys
from contextlib import contextmanager

import deepspeed
import pytest
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from megatron.core import parallel_state

from ds_lgamp.cli.environment import run_env
from ds_lgamp.cli.main import main
from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.engine.door import LgampDoor
from ds_lgamp.integrations.deepspeed.engine.pipeline_engine import LgampEngine
from ds_lgamp.integrations.deepspeed.hook.deepspeed_seams import TESTED_VERSION, all_seams, check_seams, missing_seams
from ds_lgamp.integrations.megatron.loop.megatron_seams import TESTED_VERSIONS


def report():
    output = io.StringIO()
    status = run_env(False, output)
    return status, output.getvalue()


@pytest.mark.slow
def test_the_command_reports_by_itself(capfd):
    words = [sys.executable, "-m", "ds_lgamp", "env", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert main(["env", "--json"]) == done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(capfd.readouterr().out)


def test_json_on_standard_output_names_versions_devices_and_seams(capfd):
    status, found = main(["env", "--json"]), json.loads(capfd.readouterr().out)
    assert status == 0 and found["ready"] and found["problem"] is None
    for name in ("torch", "deepspeed", "pydantic"):
        assert found["versions"][name] == importlib.metadata.version(name)
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"ds_lgamp", "megatron-core", "transformers", "apex", "transformer-engine"} < set(found["versions"])
    assert found["accelerator"] == "cpu" and found["communication_backend"] == "gloo" and found["backends"]["gloo"]
    assert found["seams"]["PipelineEngine._train_schedule"] is True and all(found["seams"].values())


def test_ready_is_the_last_word():
    status, text = report()
    assert status == 0 and text.endswith("\n\nready\n")
    assert f"{len(all_seams())} of {len(all_seams())} found" in text


def test_missing_seams_are_named(monkeypatch):
    assert missing_seams() == []
    monkeypatch.delattr(PipelineEngine, "_train_schedule")
    monkeypatch.delattr(PipelineModule, "_index_tied_modules")
    monkeypatch.delattr(deepspeed, "DualPipeVEngine")
    assert missing_seams() == [
        "deepspeed.DualPipeVEngine",
        "PipelineEngine._train_schedule",
        "PipelineModule._index_tied_modules",
    ]
    status, text = report()
    assert status == 1
    assert "missing: PipelineEngine._train_schedule" in text
    assert f"not ready: deepspeed {deepspeed.__version__} lacks deepspeed.DualPipeVEngine, PipelineEngine._t" in text
    assert text.endswith(f"; ds_lgamp is tested with {TESTED_VERSION}, install deepspeed=={TESTED_VERSION}\n")


def test_versions_that_were_not_tested_are_told(monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9" if name == "megatron-core" else version(name))
    status, text = report()
    assert status == 0
    assert [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("untested")] == [
        f"megatron-core 9.9, but {', '.join(TESTED_VERSIONS)} were tested"
    ]


def test_a_megatron_core_without_a_seam_is_not_ready(monkeypatch):
    monkeypatch.delattr(parallel_state, "set_virtual_pipeline_model_parallel_world_size")
    status, text = report()
    assert status == 1
    assert re.search("^Megatron seams +1 missing$", text, re.MULTILINE)
    assert "not ready: megatron-core" in text and "lacks megatron.core.parallel_state.set_virtual_pipeline" in text


def test_every_override_of_the_engine_is_a_seam():
    own = {*vars(LgampEngine), *vars(LgampDoor)}
    overridden = {name for name in own if hasattr(PipelineEngine, name) and not name.startswith("__")}
    assert {f"PipelineEngine.{name}" for name in overridden} <= set(all_seams())


@pytest.mark.parametrize(
    ("package", "fix"), [("torch", "install torch 2.6 or newer"), ("deepspeed", "pip install deepspeed==0.19.8")]
)
def test_what_cannot_be_imported_is_said(package, fix, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    status, text = report()
    assert status == 1
    assert f"not ready: {package} {importlib.metadata.version(package)} cannot be imported (" in text and fix in text


def test_what_is_not_installed_is_said(monkeypatch):
    version = importlib.metadata.version

    def without_deepspeed(name):
        if name == "deepspeed":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setattr(importlib.metadata, "version", without_deepspeed)
    assert report()[1].endswith("not ready: deepspeed is not installed; pip install deepspeed==0.19.8\n")
    with pytest.raises(ConfigError, match="deepspeed cannot be imported .*; install deepspeed==0.19.8"):
        check_seams()


@pytest.mark.parametrize(
    ("files", "verdict"),
    [
        ({"apex/__init__.py": ""}, "unknown version, not NVIDIA's"),
        ({"apex/optimizers.py": "class FusedAdam: ..."}, "unknown version, without its kernels (amp_C)"),
        ({"apex/optimizers.py": "class FusedAdam: ...", "amp_C.py": ""}, "unknown version"),
    ],
)
def test_apex_of_nvidia_is_told_from_its_namesake(files, verdict, tmp_path, monkeypatch):
    with apex(tmp_path, monkeypatch, files):
        assert f"apex                {verdict}\n" in report()[1]


@contextmanager
def apex(folder, monkeypatch, files):
    """Makes a package apex that can be imported in the block."""
    (folder / "apex").mkdir()
    for name, text in {"apex/__init__.py": "", **files}.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(folder)
    for name in ("apex", "apex.optimizers", "amp_C"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        yield
    finally:
        for name in ("apex", "apex.optimizers", "amp_C"):
            sys.modules.pop(name, None)


def test_what_packages_print_goes_to_standard_error(tmp_path, monkeypatch, capfd):
    with apex(tmp_path, monkeypatch, {"apex/optimizers.py": "import os; os.write(1, b'a package')"}):
        assert main(["env", "--json"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["ready"] and "a package" in captured.err


@pytest.mark.parametrize("words", ["import ds_lgamp", "from ds_lgamp.cli.main import main; main(['--help'])"])
def test_help_needs_no_torch(words):
    code = f"import sys, atexit; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); {words}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "False\n", done.stderr
