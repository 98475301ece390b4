"""The completion that shtab makes of the command line, in a real shell."""

import subprocess

import pytest

from ds_lgamp.cli.main import command_line

shtab = pytest.importorskip("shtab")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "ds_lgamp.bash"
    path.write_text(shtab.complete(command_line(), "bash"))
    return path


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["vi"], ["view"]),
        (["schedule", "--sched"], ["--schedule"]),
        (["schedule", "--schedule", "gp"], ["gpipe"]),
        (["plan", "--objective", "me"], ["memory"]),
        (["view", "re"], ["recorded"]),
        (["view", "--html", "re"], ["recorded"]),
        (["run", "tr"], ["train.py"]),
        (["checkpoint", "ver"], ["verify"]),
        (["checkpoint", "verify", "re"], ["recorded"]),
    ],
    ids=" ".join,
)
def test_bash_completes_commands_options_values_and_paths(script, tmp_path, words, completed):
    (tmp_path / "recorded").mkdir()
    (tmp_path / "train.py").touch()
    line = " ".join(f"'{word}'" for word in ["ds_lgamp", *words])
    shell = f"""
        source '{script}'
        COMP_WORDS=({line}) COMP_CWORD={len(words)}
        eval "$(complete -p ds_lgamp | sed -E 's/.* -F ([^ ]+) .*/\\1/')" ds_lgamp '{words[-1]}' ''
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert [word.rstrip("/ ") for word in done.stdout.split()] == completed, done.stderr
