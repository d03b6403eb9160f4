"""The environment of SGLang on a CPU: stand-ins for what has no CPU build, and Triton's interpreter for its allocator."""

from __future__ import annotations

import os
import sys
from pathlib import Path

FAKES = str(Path(__file__).parent / "fakes")
SETTINGS = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",  # more make these tiny matrices a hundred times slower
    "TRITON_INTERPRET": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [FAKES, os.environ.get("PYTHONPATH")])),
}
os.environ.update(SETTINGS)
sys.path.insert(0, FAKES)
