"""The files that readers, hosts and tools look for, and the rules for every file of the repository."""

import ast
import re
import subprocess
from pathlib import Path

import pytest
import yaml

import ds_lgamp
from docs.versions import versions_table
from testing import ROOT

LINK = re.compile(r"\]\(([^()\s]+)\)|(?:src|href)=\"([^\"]+)\"")
ELSEWHERE = ("http://", "https://", "mailto:", "#")
MACHINE_PATH = re.compile(r"(?<![\w.$}])/(?:work|root|home|Users|tmp)/")
PLACE = re.compile(r"`([\w/]+\.py): (\w+)`")
POINTER = re.compile(r'(docs/\w+\.md)((?:, "[^"]+"(?: and "[^"]+")*)?)')
UNFINISHED = re.compile(r"\bTO[D]O\b")


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def tracked_texts():
    """Returns path and text of every tracked text file."""
    for path in tracked_files():
        try:
            yield path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def places(pattern: re.Pattern) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in tracked_texts()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


@pytest.mark.parametrize(
    ("name", "phrases"),
    [
        ("LICENSE", ["Apache License", "Version 2.0, January 2004"]),
        ("NOTICE", ["extends DeepSpeed", "Megatron-core", "patent US12585929B2"]),
        ("CHANGELOG.md", ["keepachangelog.com", "\n## [Unreleased]\n", "\n### Upgrade notes\n"]),
        ("CONTRIBUTING.md", ["## Test", "-m full", "## Add a schedule"]),
        ("SECURITY.md", ["Report a vulnerability", "Supported versions", "checkpoint that you do not trust"]),
    ],
)
def test_a_document_says_what_it_is_for(name, phrases):
    text = (ROOT / name).read_text()
    for phrase in phrases:
        assert phrase in text


def test_the_citation_names_this_version_and_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["title"] == "ds_lgamp" and citation["version"] == ds_lgamp.__version__
    released = f"\n## [{ds_lgamp.__version__}] - {citation['date-released']}\n"
    assert released in (ROOT / "CHANGELOG.md").read_text()
    assert citation["message"] and citation["authors"] == [{"name": "The ds_lgamp contributors"}]
    (paper,) = citation["references"]
    assert paper["url"].endswith("2106.02679") and paper["authors"][0]["family-names"] == "Lamy-Poirier"


def test_the_workflow_runs_the_readmes_test_command_and_may_only_read():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert job["timeout-minutes"] == 90
    runs = {step["run"]: step["if"].split()[1] for step in job["steps"] if "run" in step}
    assert runs == {"bash .ci/run": "!=", "bash launch/test.sh --all": "=="}, "the rest of the slow tests run at night"
    for step in job["steps"]:
        assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/none@v0"))


def test_the_tested_versions_are_the_pinned_ones_on_the_python_of_the_workflow():
    header, _, versions = (line.strip("| ").split(" | ") for line in versions_table().splitlines())
    table = dict(zip(header, versions, strict=True))
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (python,) = (step["with"]["python-version"] for step in workflow["jobs"]["test"]["steps"] if "python" in str(step))
    assert table.pop("Python") == python
    pins = (ROOT / "launch" / "constraints.txt").read_text().lower().splitlines()
    assert list(table) == ["torch", "DeepSpeed", "Megatron-core"]
    for name, version in table.items():
        assert f"{name.lower()}=={version}" in pins


def test_every_relative_link_of_a_document_leads_to_a_file():
    dead = []
    for path, text in tracked_texts():
        if path.suffix == ".md":
            for link in map("".join, LINK.findall(text)):
                target = path.parent / link.partition("#")[0]
                if not link.startswith(ELSEWHERE) and not target.exists():
                    dead.append(f"{path.relative_to(ROOT)}: {link}")
    assert not dead


def test_the_changelog_names_pages_and_sections_that_exist():
    text = (ROOT / "CHANGELOG.md").read_text().replace("\n  ", " ")
    dead = []
    for page, sections in POINTER.findall(text):
        headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE) if (ROOT / page).exists() else []
        if not headings or not set(re.findall(r'"([^"]+)"', sections)) <= set(headings):
            dead.append(page + sections)
    assert not dead


def names_at_the_top(path: str) -> set[str]:
    """Returns the functions, classes and variables that a module defines."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_where_is_names_places_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where is ...?")[2].partition("\n## ")[0]
    found = PLACE.findall(text)
    assert len(found) == len(set(found)) >= 12
    assert [f"{path}: {name}" for path, name in found if name not in names_at_the_top(path)] == []


def test_no_file_mentions_a_path_of_the_machine_it_was_written_on():
    assert not places(MACHINE_PATH)


def test_no_file_is_unfinished():
    assert not places(UNFINISHED)


HOSTS_ASK = {"LgampDoor", "LgampEngine", "ModelEngine", "PartitionedOptimizer"}
"""Classes that take the place of DeepSpeed's engines and optimizers, with all of their methods."""


def test_the_package_its_files_functions_and_classes_stay_small():
    files = sorted((ROOT / "ds_lgamp").rglob("*.py"))
    assert len(files) <= 240
    long = []
    for path in files:
        text, where = path.read_text(), path.relative_to(ROOT)
        long += [f"{where}: {text.count(chr(10))} lines"] if text.count("\n") > 400 else []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 60:
                long.append(f"{where}: {node.name} is longer than 60 lines")
            elif isinstance(node, ast.ClassDef) and node.name not in HOSTS_ASK:
                methods = sum(isinstance(member, ast.FunctionDef) for member in node.body)
                long += [f"{where}: {node.name} has {methods} methods"] if methods > 20 else []
    assert long == []
