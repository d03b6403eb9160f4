"""Every cell of the kernel tables in one run: decode, store and prefill of one layer, whole decode steps of a model.

    python benchmarks/kernels/layers.py --out benchmarks/results [--only decode,store,prefill,generate]

Writes `kernels-OPERATION.json`, each with its environment, as `oscar bench` does; rows are checked before they are timed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HEADS = ["--heads", "32", "--kv-heads", "8", "--head-dim", "128"]
OTHER_HEADS = {  # D = 64 and 256, groups of 5, 7 and 12
    "14/2 x 64": ["--heads", "14", "--kv-heads", "2", "--head-dim", "64"],
    "4/1 x 256": ["--heads", "4", "--kv-heads", "1", "--head-dim", "256"],
    "40/8 x 128": ["--heads", "40", "--kv-heads", "8", "--head-dim", "128"],
    "28/4 x 128": ["--heads", "28", "--kv-heads", "4", "--head-dim", "128"],
    "96/8 x 128": ["--heads", "96", "--kv-heads", "8", "--head-dim", "128"],
}
CELLS: dict[str, list[list[str]]] = {
    "decode": [
        ["--batch", "32,8", "--context", "32768", "--codec", "fast,balanced,quality", *HEADS],
        ["--batch", "1", "--context", "4096,32768,102400", "--codec", "fast,balanced,quality", *HEADS],
        ["--batch", "8,32", "--context", "4096", *HEADS],
        ["--batch", "32,8,1", "--context", "32768", "--kernels", "triton", *HEADS],
        *(["--batch", "32", "--context", "32768", *heads] for heads in OTHER_HEADS.values()),
    ],
    "store": [
        ["--batch", "1,8,32", "--codec", "fast,balanced,quality", *HEADS],
        ["--batch", "1", "--tokens", "8192", "--codec", "fast,balanced", *HEADS],
    ],
    "prefill": [
        ["--context", "24576", "--tokens", "8192", "--codec", "fast,balanced,quality", *HEADS],
        ["--context", "32768", "--tokens", "8", "--batch", "8", *HEADS],
    ],
    "generate": [
        ["--batch", "1", "--context", "102400"],
        ["--batch", "8", "--context", "32768"],
        ["--batch", "21,64,128", "--context", "32768"],  # 21: about the most that BF16 fits
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(CELLS))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for op in options.only.split(","):
        found: dict[str, Any] = {"rows": [], "failed": []}
        for cell in CELLS[op]:
            part, error = run(op, cell)
            found["rows"] += part.get("rows", [])
            found |= {"environment": part["environment"]} if part else {}
            if error:
                found["failed"].append({"cell": cell, "error": error})
                print(f"{op} {' '.join(cell)}: {error}", file=sys.stderr)
            (options.out / f"kernels-{op}.json").write_text(json.dumps(found, indent=2) + "\n")


def run(op: str, cell: list[str]) -> tuple[dict[str, Any], str]:
    """One call of ``oscar bench`` in a process of its own, so that one that fails spoils no other."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "oscar_kv.cli", "bench", op, *cell, "--json", "--output", str(file)]
        result = subprocess.run(command, capture_output=True, text=True)
        part = json.loads(file.read_text()) if file.exists() else {}
        return part, result.stderr.strip().splitlines()[-1] if result.returncode and not part else ""


if __name__ == "__main__":
    main()
