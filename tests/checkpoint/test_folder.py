"""Checkpoints appear, are replaced and disappear as a whole."""

import errno
import json
import os
from pathlib import Path

import pytest

from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.checkpoint.folder import (
    check_tag,
    discard,
    keep_last,
    new_tensors,
    publish,
    read_latest,
    read_state,
    unfinished,
    write_latest,
)
from ds_lgamp.checkpoint.whole import read_whole, write_whole
from testing.checkpoints import content, example, forge_state, tensors_folder, written


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_there_once_it_is_published_and_not_before(tmp_path):
    folder = tmp_path / "tag"
    donor = tensors_folder(written(tmp_path / "donor"))
    tensors = new_tensors(folder)
    for path in donor.iterdir():
        path.rename(tensors / path.name)
    with pytest.raises(CheckpointError, match="tag is no checkpoint of ds_lgamp; its save was interrupted: load anoth"):
        read_whole(folder)
    assert unfinished(tmp_path) == ["tag"]
    publish(folder, tensors, example_state())
    assert unfinished(tmp_path) == []
    assert content(read_whole(folder)) == content(example())
    assert names(folder) == ["state.json", tensors.name]


def example_state():
    from ds_lgamp.checkpoint.values import encode

    return encode(example().state)


def test_saving_a_tag_again_replaces_it_and_removes_what_interrupted_saves_left(tmp_path):
    folder = written(tmp_path / "tag")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tensors-0badcafe").mkdir()
    changed = example()
    changed.parameters["1.gain"] += 1
    write_whole(folder, changed)
    assert content(read_whole(folder)) == content(changed)
    assert names(folder) == ["state.json", tensors_folder(folder).name, "tokenizer.json"]


def test_until_a_tag_is_published_again_the_old_checkpoint_is_whole(tmp_path):
    folder = written(tmp_path / "tag")
    unfinished = new_tensors(folder)
    (unfinished / "__0_0.distcp").write_bytes(b"half")
    assert content(read_whole(folder)) == content(example())
    discard(unfinished)
    assert names(folder) == ["state.json", tensors_folder(folder).name]


def test_what_is_published_is_not_discarded(tmp_path):
    folder = written(tmp_path / "tag")
    discard(tensors_folder(folder))
    assert content(read_whole(folder)) == content(example())


def test_what_may_be_published_is_not_discarded_while_nobody_can_tell(tmp_path, monkeypatch):
    folder = written(tmp_path / "tag")

    def fails(*_, **__):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", fails)
        discard(tensors_folder(folder))
    assert content(read_whole(folder)) == content(example())


def test_a_file_system_that_cannot_sync_folders_keeps_checkpoints_all_the_same(tmp_path, monkeypatch):
    sync, code = os.fsync, errno.EINVAL

    def fails_for_folders(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(code, os.strerror(code))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fails_for_folders)
    written(tmp_path / "tag")
    write_latest(tmp_path, "tag")
    assert content(read_whole(tmp_path / (read_latest(tmp_path) or ""))) == content(example())
    code = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        write_latest(tmp_path, "tag")


def test_of_a_first_save_that_fails_nothing_stays(tmp_path):
    discard(new_tensors(tmp_path / "tag"))
    assert names(tmp_path) == []


def test_a_whole_checkpoint_that_cannot_be_written_leaves_nothing(tmp_path):
    whole = example()
    whole.client_state["here"] = print
    with pytest.raises(TypeError):
        write_whole(tmp_path / "tag", whole)
    whole = example()
    whole.state["lr_scheduler"] = print
    with pytest.raises(TypeError):
        write_whole(tmp_path / "tag", whole)
    whole = example()
    whole.state["counters"]["global_steps"] = 3.5
    with pytest.raises(CheckpointError, match="counters.global_steps: Input should be a valid integer"):
        write_whole(tmp_path / "tag", whole)
    assert names(tmp_path) == []


def test_the_last_checkpoints_are_kept_and_that_named_in_latest(tmp_path):
    for age, tag in enumerate(["new", "user's", "latest one", "old", "older"]):
        write_whole(tmp_path / tag, example())
        os.utime(tmp_path / tag / "state.json", (1000 - age, 1000 - age))
    (tmp_path / "user's" / "notes").write_text("")
    (tmp_path / "no checkpoint").mkdir()
    write_latest(tmp_path, "latest one")
    keep_last(tmp_path, "new", 1)
    assert names(tmp_path) == ["latest", "latest one", "new", "no checkpoint", "user's"]
    assert names(tmp_path / "user's") == ["notes"]
    for tag in ("new", "latest one"):
        assert content(read_whole(tmp_path / tag)) == content(example())


def test_what_interrupted_saves_left_is_removed_with_old_checkpoints(tmp_path):
    write_whole(tmp_path / "new", example())
    for path in ("cut/tensors-0badcafe", "user's/tensors-0badcafe", "writing/tensors-0badcafe", "data/tensors-train"):
        (tmp_path / path).mkdir(parents=True)
        file = tmp_path / path / "__0_0.distcp"
        file.write_text("")
        if not path.startswith("writing"):
            os.utime(file, (1000, 1000))
            os.utime(file.parent, (1000, 1000))
    (tmp_path / "user's" / "notes").write_text("")
    keep_last(tmp_path, "new", 2)
    assert names(tmp_path) == ["data", "new", "user's", "writing"] and names(tmp_path / "user's") == ["notes"]
    assert names(tmp_path / "data") == ["tensors-train"], "no save names a folder so"


def test_only_checkpoints_are_removed_and_none_through_a_link(tmp_path):
    for age, tag in enumerate(["new", "old"]):
        write_whole(tmp_path / tag, example())
        os.utime(tmp_path / tag / "state.json", (1000 - age, 1000 - age))
    for alias in ("also new", "best"):
        (tmp_path / alias).symlink_to(tmp_path / "new")
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "state.json").write_text("{}")
    keep_last(tmp_path, "new", 1)
    assert names(tmp_path) == ["also new", "app", "best", "new"]
    assert content(read_whole(tmp_path / "new")) == content(example())


def test_tags_of_several_folders_are_removed_like_others(tmp_path):
    for age, tag in enumerate(["run/new", "run/old", "run/latest", "elsewhere"]):
        write_whole(tmp_path / tag, example())
        os.utime(tmp_path / tag / "state.json", (1000 - age, 1000 - age))
    write_latest(tmp_path, "run/latest")
    keep_last(tmp_path, "run/new", 1)
    assert names(tmp_path / "run") == ["latest", "new"] and (tmp_path / "elsewhere" / "state.json").is_file()


def test_a_tag_below_another_may_be_called_as_tensors_are(tmp_path):
    write_whole(tmp_path / "a" / "tensors-best", example())
    write_whole(tmp_path / "a", example())
    write_whole(tmp_path / "a", example())
    assert content(read_whole(tmp_path / "a" / "tensors-best")) == content(example())


def test_latest_is_what_was_written_last(tmp_path):
    assert read_latest(tmp_path) is None and read_latest(tmp_path / "absent") is None
    write_latest(tmp_path, "first")
    write_latest(tmp_path, "run/second")
    assert read_latest(tmp_path) == "run/second" and names(tmp_path) == ["latest"]


def test_two_jobs_may_name_their_checkpoints_in_one_folder_at_once(tmp_path, monkeypatch):
    sync = os.fsync

    def other_job_writes_meanwhile(descriptor):
        monkeypatch.setattr(os, "fsync", sync)
        write_latest(tmp_path, "a longer tag of another job")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", other_job_writes_meanwhile)
    write_latest(tmp_path, "own")
    assert read_latest(tmp_path) == "own" and names(tmp_path) == ["latest"]


def test_what_a_job_left_that_was_killed_is_removed_after_a_day(tmp_path):
    for name in (".latest.partial", ".latest.0badcafe.partial", ".latest.0badbeef.partial"):
        (tmp_path / name).write_text("")
        if name != ".latest.0badbeef.partial":
            os.utime(tmp_path / name, (1000, 1000))
    write_latest(tmp_path, "tag")
    assert names(tmp_path) == [".latest.0badbeef.partial", "latest"]


@pytest.mark.parametrize("tag", ["", ".", "..", "a/../../b", "/absolute", "a\0b", "a\nb"])
def test_a_tag_is_a_folder_inside_the_directory(tmp_path, tag):
    with pytest.raises(CheckpointError, match="name a folder inside the checkpoint's directory"):
        check_tag(tag)


@pytest.mark.parametrize("text", [b"", b"../elsewhere", b"/etc", b"a\0b", b"\xff\xfe\0"])
def test_a_broken_latest_is_refused(tmp_path, text):
    (tmp_path / "latest").write_bytes(text)
    with pytest.raises(CheckpointError, match="latest: the tag is '.*'; name a folder inside"):
        read_latest(tmp_path)


def test_what_is_no_checkpoint_says_what_to_do_instead(tmp_path):
    (tmp_path / "stock").mkdir()
    (tmp_path / "stock" / "mp_rank_00_model_states.pt").write_bytes(b"")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="stock DeepSpeed wrote it: convert it with ds_lgamp checkpoint import"):
        read_state(tmp_path / "stock")
    for name in ("absent", "file"):
        with pytest.raises(CheckpointError, match=f"{name} is no checkpoint of ds_lgamp; name a folder and tag"):
            read_state(tmp_path / name)


def test_another_format_is_refused(tmp_path):
    folder = written(tmp_path / "tag")
    forge_state(folder, lambda state: state.update(format=4))
    with pytest.raises(CheckpointError, match="has format 4, but this release of ds_lgamp reads 3; use the"):
        read_state(folder)
    (folder / "state.json").write_text(json.dumps({"format": 3}))
    with pytest.raises(CheckpointError, match="state.json is damaged"):
        read_state(folder)


def test_a_scheduler_decides_what_its_state_is(tmp_path):
    whole = example()
    whole.state["lr_scheduler"]["state"] = [0.1, (3, "linear")]
    write_whole(tmp_path / "tag", whole)
    assert content(read_whole(tmp_path / "tag")) == content(whole)
