"""The published sdist is the repository. The wheel made from it is the package, works without the repository, and
leaves torch and deepspeed as they are."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import ds_lgamp
from testing import ROOT, SCRIPTS
from testing.launching import ON_CPU

FOLDERS = (
    ".ci",
    ".github",
    "benchmarks",
    "docs",
    "ds_lgamp",
    "example_configs",
    "launch",
    "patches",
    "testing",
    "tests",
)
FILES = (
    ".gitignore",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "MANIFEST.in",
    "NOTICE",
    "README.md",
    "SECURITY.md",
    "pyproject.toml",
)


def run(*words: object, cwd: Path, **variables: str) -> str:
    """Returns the output of a command that runs outside the checkout, without the surrounding settings of pip and
    Python, but with ``variables``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env={**kept, "PIP_CONFIG_FILE": os.devnull, **variables},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Copies the sources, because building writes into their folder."""
    folder = tmp_path_factory.mktemp("source")
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def built(source):
    """Returns the folder with the sdist and the wheel made from that sdist, and the names of all source files."""
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", source / "dist", cwd=source)
    return source / "dist", files


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built[0].glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """Makes an environment with the packages of this one except for ds_lgamp, and installs the wheel into it.

    Nothing can be downloaded, so every package that the wheel requires must exist already.
    """
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    lines = []
    for number, outer in enumerate(path for path in map(Path, sys.path) if any(path.glob("*.dist-info"))):
        # Links every package, because the whole folder would also offer a ds_lgamp that is installed in place.
        view = folder / f"packages{number}"
        view.mkdir()
        for path in outer.iterdir():
            if "ds_lgamp" not in path.name and path.suffix != ".pth":
                (view / path.name).symlink_to(path)
        lines.append(f"{view}\n")
    (site / "outer_environment.pth").write_text("".join(lines))
    report = run(folder / "venv" / "bin" / "python", "-m", "pip", "install", "--no-index", wheel, cwd=folder)
    assert f"Successfully installed ds-lgamp-{ds_lgamp.__version__}" in report.splitlines()[-1]
    return folder / "venv"


def evaluate(python: Path | str, code: str, cwd: Path):
    """Returns ``result`` after ``code`` has run in a fresh interpreter that sees only its own environment."""
    script = f"import json\n{code}\nprint(json.dumps(result))"
    return json.loads(run(python, "-I", "-c", script, cwd=cwd))


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(built, wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    information = f"ds_lgamp-{ds_lgamp.__version__}.dist-info"
    packages = {name for name in names if not name.startswith(f"{information}/")}
    assert packages == {name for name in built[1] if name.startswith("ds_lgamp/")}
    assert {
        "ds_lgamp/py.typed",
        "ds_lgamp/schedule/orders.py",
        "ds_lgamp/integrations/deepspeed/engine/training.py",
        "ds_lgamp/view/page/page.html",
        "ds_lgamp/view/page/d3.js",
    } <= packages
    assert {f"{information}/licenses/LICENSE", f"{information}/licenses/NOTICE"} <= names


def test_the_sdist_is_the_whole_repository(built):
    (path,) = built[0].glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    added = {name for name in names if not name.startswith("ds_lgamp.egg-info/")} - {"PKG-INFO", "setup.cfg"}
    assert added == built[1]


def test_the_copied_sources_are_all_that_git_tracks(built):
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    assert {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()} <= built[1]


@pytest.mark.slow
def test_torch_and_deepspeed_stay_the_outer_environments(environment, tmp_path):
    code = """
import importlib.metadata, importlib.util, os
result = {
    name: [os.path.realpath(importlib.util.find_spec(name).origin), importlib.metadata.version(name)]
    for name in ("torch", "deepspeed")
}"""
    inner, outer = (evaluate(python, code, tmp_path) for python in (environment / "bin" / "python", sys.executable))
    assert inner == outer
    (site,) = (environment / "lib").glob("python*/site-packages")
    installed = {path.name for path in site.iterdir()}
    assert installed == {"ds_lgamp", f"ds_lgamp-{ds_lgamp.__version__}.dist-info", "outer_environment.pth"}


@pytest.mark.slow
def test_the_installed_package_is_the_wheels_not_the_checkouts(environment, tmp_path):
    origin = evaluate(environment / "bin" / "python", "import ds_lgamp\nresult = ds_lgamp.__file__", tmp_path)
    assert Path(origin).is_relative_to(environment)


@pytest.mark.slow
def test_the_installed_command_simulates_a_schedule(environment, tmp_path):
    report = json.loads(run(environment / "bin" / "ds_lgamp", "schedule", "--json", cwd=tmp_path))
    assert report["valid"] and len(report["program"]) == 4


@pytest.mark.slow
def test_the_installed_command_plans_and_draws_in_an_empty_folder(environment, tmp_path):
    command = environment / "bin" / "ds_lgamp"
    assert f"ds_lgamp {ds_lgamp.__version__}\n" == run(command, "--version", cwd=tmp_path)
    words = ["plan", "--model", "llama-8b", "--cluster", "a100", "--gpus", "16", "--batch-size", "64", "--json"]
    assert "layered" in run(command, *words, cwd=tmp_path)
    run(command, "schedule", "--html", "page.html", cwd=tmp_path)
    page = (tmp_path / "page.html").read_text()
    for file in (ROOT / "ds_lgamp" / "view" / "page").glob("*.js"):
        assert file.read_text().strip() in page


@pytest.mark.slow
def test_two_ranks_train_with_a_block_alone_and_explain_it_in_an_empty_folder(environment, tmp_path):
    shutil.copy(SCRIPTS / "public_example.py", tmp_path / "train.py")
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 3}}
    (tmp_path / "ds_config.json").write_text(json.dumps({**config, "ds_lgamp": {}}))
    script = ["train.py", "--deepspeed_config", "ds_config.json"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    told = run(environment / "bin" / "python", *torchrun, *script, cwd=tmp_path, **ON_CPU)
    engine, *losses = told.split("RESULT ")[1].split()
    assert engine == "LgampEngine" and len(losses) == 5
    explained = run(environment / "bin" / "ds_lgamp", "run", "--explain", "--ranks", "2", *script, cwd=tmp_path)
    assert "2 pipeline x 1 data-parallel ranks, schedule layered" in explained


@pytest.mark.slow
def test_importing_loads_no_heavy_package(environment, tmp_path):
    code = """
import sys
import ds_lgamp
result = [name for name in ("torch", "deepspeed", "pydantic") if name in sys.modules]"""
    assert evaluate(environment / "bin" / "python", code, tmp_path) == []
