"""Another vLLM release to test with: its Python code beside the compiled operations of the installed build for CPUs.

python tests/vllm/overlay.py 0.33.0 FOLDER     then put FOLDER first on PYTHONPATH
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path


def main(release: str, folder: Path) -> None:
    if (folder / "vllm").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    subprocess.run([*download, f"vllm=={release}"], check=True)
    (wheel,) = folder.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith((".py", "METADATA"))])
    wheel.unlink()
    (metadata,) = folder.glob("vllm-*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8").replace(f"\nVersion: {release}\n", f"\nVersion: {release}+cpu\n", 1)
    metadata.write_text(text, encoding="utf-8")  # by this, vLLM knows that it runs on a CPU
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    for library in Path(spec.origin).parent.glob("*.so"):
        shutil.copy(library, folder / "vllm")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
