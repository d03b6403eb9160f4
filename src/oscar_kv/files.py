"""What is written appears whole or not at all: an artifact's folder, text files, and JSON without NaN.

Everything new is written in a hidden folder beside its target, so that it is on the same disk, and renamed into place.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import InputError

TRANSFORMS, DESCRIPTION, MOMENTS = "transforms.safetensors", "oscar.json", "moments.safetensors"
ATTEMPTS = 100  # to move a folder into place while others save to the same target

logger = logging.getLogger(__name__)
_one_at_a_time = threading.Lock()


class ArtifactError(InputError):
    """An artifact that cannot be used or written; the message names the file and what is wrong with it."""


def finite(value: Any) -> Any:
    """JSON-ready copy with null for NaN and infinities, which JSON does not have: null stands for what was not measured."""
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def holds_artifact(folder: str | os.PathLike[str]) -> bool:
    """Whether saving to this folder would replace an artifact."""
    return (Path(folder) / DESCRIPTION).exists()


@contextmanager
def replacing_folder(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A new folder beside the target, moved into its place at the end, or removed if anything goes wrong.

    A target that is a symbolic link stays one: what it points to is replaced. Permissions are those of the folder and the
    files that are replaced, or what ``mkdir`` and ``open`` give. Of several that save at once, the last one stays, whole.

    Raises:
        ArtifactError: the target is no folder, holds anything that is not of an artifact, or is a folder that cannot be
            replaced as a whole (the current folder, a mount point). Nothing was touched.
        OSError: the target cannot be written. What was there is still there.
    """
    target = Path(os.path.realpath(folder))
    with _one_at_a_time:
        _check_replaceable(target, folder)
    with _beside(target) as hidden:
        partial = hidden / "new"
        partial.mkdir()
        yield partial
        with _one_at_a_time:  # of this process; other processes are met by trying again
            _check_replaceable(target, folder)
            _set_modes(partial, target, hidden)
            _move_into_place(partial, target, hidden)


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write a file in UTF-8 under a temporary name, then move it into place.

    Links and permissions are kept; a pipe or a device, such as ``/dev/stdout``, is written to as it is.
    """
    if Path(path).exists() and not Path(path).is_file():
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(text)
        return Path(path)
    with replacing_files(path) as (partial,):
        partial.write_text(text, encoding="utf-8")
    return Path(path)


@contextmanager
def replacing_files(*paths: str | os.PathLike[str]) -> Iterator[list[Path]]:
    """New files of the same names, each in a hidden folder beside its target, moved into place once all are complete.

    If anything goes wrong before, they are removed and nothing was touched. Links and permissions are kept. Several that write
    the same files at once do not meet: the last one's stay.
    """
    targets = [Path(os.path.realpath(path)) for path in paths]
    with ExitStack() as stack:
        partials = [stack.enter_context(_beside(target)) / target.name for target in targets]
        yield partials
        for partial, target in zip(partials, targets, strict=True):
            _set_mode(partial, _mode(target))
        for partial, target in zip(partials, targets, strict=True):
            partial.replace(target)


# -- steps -------------------------------------------------------------------------------------------------------


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A hidden folder of our own beside the target, removed at the end with all it holds."""
    target.parent.mkdir(parents=True, exist_ok=True)
    hidden = Path(tempfile.mkdtemp(prefix=".oscar-", suffix=".partial", dir=target.parent))
    try:
        yield hidden
    except _NotPutBack:  # it is all that is left of the earlier artifact
        raise
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    shutil.rmtree(hidden, ignore_errors=True)


class _NotPutBack(OSError):
    """The earlier artifact stayed in the hidden folder."""


def _check_replaceable(target: Path, named: str | os.PathLike[str]) -> None:
    name = os.fspath(named) or "."
    try:
        entries = sorted(target.iterdir())
        current = target.samefile(".")
    except (FileNotFoundError, NotADirectoryError) as error:
        if target.exists() and not target.is_dir():
            raise ArtifactError(f"{name} exists and is not a folder") from error
        return  # it can be made, or what is in the way of that will say so
    if others := [p.name for p in entries if p.name not in (DESCRIPTION, TRANSFORMS, MOMENTS) or p.is_dir()]:
        listed = ", ".join(map(repr, others[:3])) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise ArtifactError(
            f"{name} holds files that are not an artifact's: {listed}; move them away or choose another folder, nothing was "
            "overwritten"
        )
    if entries and target / DESCRIPTION not in entries:
        raise ArtifactError(f"{name} exists and holds no {DESCRIPTION}: choose another folder, nothing was overwritten")
    if os.path.ismount(target) or current:
        what = "a mount point" if os.path.ismount(target) else "the current folder"
        raise ArtifactError(
            f"{name} is {what} and cannot be replaced as a whole: name a folder in it, such as {Path(name) / 'model.oscar'}"
        )


def _set_modes(partial: Path, target: Path, hidden: Path) -> None:
    """Permissions as if the folder and the files had been made, or written again, by ``mkdir`` and ``open``."""
    probe = hidden / "mode"
    probe.touch()
    _set_mode(partial, _mode(target))
    for file in partial.iterdir():
        _set_mode(file, _mode(target / file.name) or _mode(probe))


def _mode(path: Path) -> int | None:
    """Permissions of a file or folder; None if there is none."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return None


def _set_mode(path: Path, mode: int | None) -> None:
    if mode is not None and mode != _mode(path):
        path.chmod(mode)


def _move_into_place(partial: Path, target: Path, hidden: Path) -> None:
    """Rename, after the earlier folder was moved out of the way; if that fails, the earlier folder is put back."""
    old = hidden / "old"
    for _ in range(ATTEMPTS):
        try:
            with suppress(FileNotFoundError):
                target.rename(old)
            partial.rename(target)
        except BaseException as error:
            if old.exists():
                _put_back(old, target)
            if _is_taken(error):
                shutil.rmtree(old, ignore_errors=True)  # someone else has replaced it meanwhile: now replace theirs
                continue
            raise
        if old.exists():
            logger.info("replaced an earlier artifact in %s", target)
        return
    raise OSError(errno.EBUSY, "others keep saving to this folder", str(target))


def _put_back(old: Path, target: Path) -> None:
    try:
        old.rename(target)
    except BaseException as error:
        if not _is_taken(error):
            raise _NotPutBack(f"{target} could not be replaced ({error}); the earlier artifact is in {old}") from error


def _is_taken(error: BaseException) -> bool:
    """Whether a rename failed because someone else had put a folder there."""
    return isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST)
