"""What is written appears whole or not at all, with the permissions and links that plain writing would leave."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import random_transform

from oscar_kv.artifact import DESCRIPTION, TRANSFORMS, Artifact, ArtifactError
from oscar_kv.config import OscarConfig
from oscar_kv.files import finite, holds_artifact, replacing_files, replacing_folder, write_text

POSIX = pytest.mark.skipif(os.name != "posix", reason="permissions and links of POSIX")


def make(method: str = "first") -> Artifact:
    return Artifact({0: random_transform(1, 8, group_size=8)}, OscarConfig(), method)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o022, 0o077, 0o002], ids=["022", "077", "002"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    earlier = os.umask(request.param)
    yield request.param
    os.umask(earlier)


# -- folders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [1, 2], ids=["old away", "new in"])
@pytest.mark.parametrize("error", [OSError("disk gone"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_rename_that_fails_leaves_the_old_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, error: BaseException
) -> None:
    make("first").save(tmp_path / "a")
    calls, rename = [], Path.rename

    def failing_rename(self: Path, target: Path) -> Path:
        calls.append(self)
        if len(calls) == failing:
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing_rename)
    with pytest.raises(type(error)):
        make("second").save(tmp_path / "a")
    monkeypatch.undo()
    assert names(tmp_path) == ["a"]
    assert Artifact.load(tmp_path / "a").method == "first"


def test_an_interrupt_just_after_the_old_artifact_was_moved_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("first").save(tmp_path / "a")
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        rename(self, target)
        monkeypatch.setattr(Path, "rename", rename)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make("second").save(tmp_path / "a")
    assert names(tmp_path) == ["a"]
    assert Artifact.load(tmp_path / "a").method == "first"


def test_an_artifact_that_cannot_be_put_back_is_kept_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("first").save(tmp_path / "a")
    rename = Path.rename

    def only_away(self: Path, target: Path) -> Path:
        if self != tmp_path / "a":
            raise OSError("disk gone")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", only_away)
    with pytest.raises(OSError, match="the earlier artifact is in ") as caught:
        make("second").save(tmp_path / "a")
    assert Artifact.load(str(caught.value).rsplit(" in ", 1)[1]).method == "first"


@POSIX
def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "a"
    link.symlink_to(tmp_path / "disk" / "real", target_is_directory=True)  # of nothing yet
    for method in ("first", "second"):
        assert make(method).save(link) == link
        assert link.is_symlink()
        assert Artifact.load(link).method == Artifact.load(tmp_path / "disk" / "real").method == method
    assert names(tmp_path) == ["a", "disk"]
    assert names(tmp_path / "disk") == ["real"]


def test_files_of_others_are_named_and_nothing_is_touched(tmp_path: Path) -> None:
    make("first").save(tmp_path / "a")
    others = ["README.md", "b", "c", "d"]
    for name in others:
        (tmp_path / "a" / name).write_text("mine", encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"'README\.md', 'b', 'c' and 1 more; .*nothing was overwritten"):
        make("second").save(tmp_path / "a")
    assert Artifact.load(tmp_path / "a").method == "first"
    assert names(tmp_path / "a") == sorted([*others, DESCRIPTION, TRANSFORMS])
    for name in others:
        (tmp_path / "a" / name).unlink()
    (tmp_path / "a" / "moments.safetensors").mkdir()
    with pytest.raises(ArtifactError, match=r"'moments\.safetensors'"):
        make("second").save(tmp_path / "a")


def test_files_that_appear_while_saving_are_safe(tmp_path: Path) -> None:
    def save() -> None:
        with replacing_folder(make().save(tmp_path / "a")) as partial:
            (partial / DESCRIPTION).write_text("new", encoding="utf-8")
            (tmp_path / "a" / "notes.txt").write_text("mine", encoding="utf-8")

    with pytest.raises(ArtifactError, match=r"'notes\.txt'"):
        save()
    assert names(tmp_path) == ["a"]
    assert names(tmp_path / "a") == ["notes.txt", DESCRIPTION, TRANSFORMS]
    assert Artifact.load(tmp_path / "a").method == "first"


def in_threads(work: Callable[[int], object], count: int = 8) -> None:
    errors, ready = [], threading.Barrier(count)

    def run(i: int) -> None:
        try:
            ready.wait()
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_threads_that_save_to_one_folder_leave_one_whole_artifact(tmp_path: Path) -> None:
    def artifact(i: int) -> Artifact:
        return Artifact({0: random_transform(1, 8, seed=i, group_size=8)}, OscarConfig(), str(i))

    in_threads(lambda i: [artifact(i).save(tmp_path / "a") for _ in range(5)])
    assert names(tmp_path) == ["a"]
    left = Artifact.load(tmp_path / "a")
    assert torch.equal(left.layers[0].key_in, artifact(int(left.method)).layers[0].key_in)


@POSIX
def test_permissions_are_those_of_plain_writing(tmp_path: Path, umask: int) -> None:
    folder = make().save(tmp_path / "new" / "a")
    assert mode(folder) == mode(folder.parent) == 0o777 & ~umask
    assert {mode(p) for p in folder.iterdir()} == {0o666 & ~umask}
    folder.chmod(0o750)
    (folder / TRANSFORMS).chmod(0o640)
    make("second").save(folder)
    assert mode(folder) == 0o750
    assert [mode(folder / name) for name in (TRANSFORMS, DESCRIPTION)] == [0o640, 0o666 & ~umask]


@pytest.mark.parametrize("name", ["a/", "a//", "./a", "b/../a", "a/."])
def test_other_spellings_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    for method in ("first", "second"):
        make(method).save(name)
        assert Artifact.load(tmp_path / "a").method == method
    assert names(tmp_path) == ["a"]


def test_the_current_folder_and_those_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for name in (".", "", "./", "../here", here):
        with pytest.raises(ArtifactError, match=r"is the current folder .*name a folder in it, such as .*model\.oscar"):
            make().save(name)
    with pytest.raises(ArtifactError, match=r"^\.\. holds files that are not an artifact's: 'here'"):
        make().save("..")
    with pytest.raises(ArtifactError, match="nothing was overwritten"):
        make().save("/")
    assert names(here) == []
    assert names(tmp_path) == ["here"]


def test_a_folder_below_a_file_is_refused_by_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    with pytest.raises(OSError, match="file"):
        make().save(tmp_path / "file" / "a")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_mount_point_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path)
    with pytest.raises(ArtifactError, match="is a mount point"):
        make().save(tmp_path)


def test_replacing_is_said_and_can_be_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "oscar_kv")
    assert not holds_artifact(tmp_path / "a")
    make("first").save(tmp_path / "a", overwrite=False)
    assert caplog.messages == []
    assert holds_artifact(tmp_path / "a")
    with pytest.raises(ArtifactError, match="already holds an artifact; overwrite=True"):
        make("second").save(tmp_path / "a", overwrite=False)
    assert Artifact.load(tmp_path / "a").method == "first"
    make("second").save(tmp_path / "a")
    assert caplog.messages == [f"replaced an earlier artifact in {tmp_path / 'a'}"]


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    broken = make()
    broken.provenance["warnings"] = "one string"
    with pytest.raises(ArtifactError, match=r"provenance\.warnings is 'one string'"):
        broken.save(tmp_path / "a")
    assert names(tmp_path) == []


def test_tensors_that_share_memory_are_saved(tmp_path: Path) -> None:
    eye = torch.eye(8).expand(2, 8, 8)
    shared = random_transform(2, 8, group_size=8)
    for name in ("key_in", "query_in", "value_in", "output_out"):
        object.__setattr__(shared, name, eye)
    loaded = Artifact.load(Artifact({0: shared}, OscarConfig(), "none").save(tmp_path / "a"))
    assert all(torch.equal(loaded.layers[0].tensors()[n], t) for n, t in shared.tensors().items())


# -- several files -----------------------------------------------------------------------------------------------


def test_several_files_are_replaced_together_or_not_at_all(tmp_path: Path) -> None:
    first, second = tmp_path / "a.pt", tmp_path / "deep" / "b.pt"
    first.write_text("old")
    first.chmod(0o600)

    def interrupted() -> None:
        with replacing_files(first, second) as partials:
            partials[0].write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert first.read_text() == "old"
    assert names(tmp_path / "deep") == []
    with replacing_files(first, second) as partials:
        assert [p.name for p in partials] == ["a.pt", "b.pt"]
        for partial in partials:
            partial.write_text("new")
    assert (first.read_text(), second.read_text()) == ("new", "new")
    assert first.stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == ["a.pt", "deep"]


# -- JSON --------------------------------------------------------------------------------------------------------


def test_what_was_not_measured_is_null(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    artifact = make()
    artifact.fidelity = {"kl_mean": nan, "perplexity": inf, "top1_agreement": 0.5}
    artifact.provenance = {"selection": [{"kl": (1.0, -inf)}]}
    folder = artifact.save(tmp_path / "a")
    text = (folder / DESCRIPTION).read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    loaded = Artifact.load(folder)
    assert loaded.fidelity == {"kl_mean": None, "perplexity": None, "top1_agreement": 0.5}
    assert loaded.provenance == {"selection": [{"kl": [1.0, None]}]}
    assert loaded.description() == artifact.description()
    (folder / DESCRIPTION).write_text(text.replace('"kl_mean": null', '"kl_mean": NaN'))  # as earlier releases wrote it
    assert Artifact.load(folder).fidelity["kl_mean"] is None


def test_finite_keeps_everything_else() -> None:
    value = {"a": [1, 2.5, None, True, "x"], "b": {"c": {}}}
    assert finite(value) == value
    assert json.dumps(finite({1: (float("nan"),)}), allow_nan=False) == '{"1": [null]}'


# -- text --------------------------------------------------------------------------------------------------------


def test_threads_that_write_one_file_leave_one_whole_text(tmp_path: Path) -> None:
    texts = [str(i) * 100_000 for i in range(8)]
    in_threads(lambda i: [write_text(tmp_path / "x.json", texts[i]) for _ in range(10)])
    assert names(tmp_path) == ["x.json"]
    assert (tmp_path / "x.json").read_text() in texts


def test_a_text_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    write_text(tmp_path / "x.txt", "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "x.txt", "new \ud800")
    assert names(tmp_path) == ["x.txt"]
    assert (tmp_path / "x.txt").read_text() == "old"


@POSIX
def test_permissions_and_links_of_texts(tmp_path: Path, umask: int) -> None:
    file, link = tmp_path / "x.txt", tmp_path / "link.txt"
    link.symlink_to(file)
    assert write_text(link, "1") == link
    assert mode(file) == 0o666 & ~umask
    file.chmod(0o604)
    write_text(link, "2")
    assert link.is_symlink()
    assert file.read_text() == "2"
    assert mode(file) == 0o604


@POSIX
def test_devices_and_pipes_are_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_text(pipe, "through")
    reader.join(20)
    assert read == ["through"]
    write_text(os.devnull, "gone")
    assert not Path(os.devnull).is_file()
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path, "x")
