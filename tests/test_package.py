"""The published sdist and wheel install beside an existing torch and deepspeed and leave them unchanged."""

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
from testing import ROOT

FOLDERS = ("ds_lgamp", "benchmarks", "docs", "example_configs", "launch", "testing", "tests")
FILES = ("LICENSE", "NOTICE", "README.md", "pyproject.toml")


def run(*words: object, cwd: Path) -> str:
    """Returns the output of a command that runs outside the checkout, without the surrounding settings of pip and
    Python."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env={**kept, "PIP_CONFIG_FILE": os.devnull},
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
    """Returns the folder with the sdist, and the wheel made from that sdist."""
    packages = {path.relative_to(source).as_posix() for path in (source / "ds_lgamp").rglob("*") if path.is_file()}
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", source / "dist", cwd=source)
    return source / "dist", packages


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
    assert packages == built[1]
    assert {
        "ds_lgamp/py.typed",
        "ds_lgamp/schedule/orders.py",
        "ds_lgamp/integrations/deepspeed/engine/training.py",
        "ds_lgamp/view/page/page.html",
        "ds_lgamp/view/page/d3.js",
    } <= packages
    assert {f"{information}/licenses/LICENSE", f"{information}/licenses/NOTICE"} <= names


def test_the_sdist_can_be_read_and_built_by_itself(built):
    (path,) = built[0].glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*FILES, *built[1]} <= names


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
def test_importing_loads_no_heavy_package(environment, tmp_path):
    code = """
import sys
import ds_lgamp
result = [name for name in ("torch", "deepspeed", "pydantic") if name in sys.modules]"""
    assert evaluate(environment / "bin" / "python", code, tmp_path) == []
