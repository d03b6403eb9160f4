"""What the tests of the commands share: running one, and reading what ``--json`` prints."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from oscar_kv.cli import app

CALIBRATION = ["--tokens", "512", "--seq-len", "128", "--sink", "4", "--recent", "16"]


def run(*args: Any, status: int = 0, stdin: str | None = None) -> Any:
    """A command that ends with this status and without a traceback."""
    result = CliRunner().invoke(app, [str(a) for a in args], input=stdin)
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    assert "Traceback" not in result.output
    return result


def results(*args: Any, status: int = 0) -> dict[str, Any]:
    """What ``--json`` prints; nothing else may be on standard output."""
    found: dict[str, Any] = json.loads(run(*args, "--json", status=status).stdout)
    return found
