"""Runs generated Python programs in a process of their own, with limits, and says whether they reached their end.

The limits keep a wrong program from hurting the machine or passing by accident: wall-clock time, processor time, memory, file
size, an empty temporary folder, no network where the system allows a private namespace, and death of the whole process
group. It is no wall against a program written to break out: run untrusted models in a container.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

TIME_LIMIT = 10.0  # seconds
MEMORY_LIMIT = 1 << 30  # bytes of address space
OUTPUT_LIMIT = 10_000  # bytes kept of what a program prints
FILE_LIMIT = 10 << 20  # bytes of one file

# The child's own program. The verdict goes through a pipe of its own and carries a word that the program tested does not know,
# so that neither an early exit nor a print looks like success.
_CHILD = """
import json, os, resource, sys
task = json.loads(sys.stdin.buffer.readline())
pid, verdict = os.getpid(), task["verdict"]
try:
    import ctypes
    private = ctypes.CDLL(None).unshare(0x10000000 | 0x40000000) == 0  # user and network namespaces
except (ImportError, OSError, AttributeError):
    private = False
for kind, limit in ((resource.RLIMIT_AS, task["memory"]), (resource.RLIMIT_CPU, task["seconds"]),
                    (resource.RLIMIT_FSIZE, task["file"]), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(kind, (limit, limit))
try:
    exec(compile(task["program"], "program.py", "exec"), {"__name__": "__main__"})
    result = {"passed": task["word"]}
except BaseException as error:
    result = {"reason": f"{type(error).__name__}: {error}"[:500]}
try:
    sys.stdout.flush()
except BaseException:
    pass  # closed or replaced by the program
if os.getpid() == pid:
    os.write(verdict, json.dumps({**result, "private": private}).encode())
os._exit(0)
"""


@dataclass(frozen=True)
class Outcome:
    """Of one program.

    Attributes:
        passed: it ran to its end.
        reason: "passed", "timed out", the exception, or how the process ended.
        output: the beginning of what it printed.
        seconds: wall-clock time.
        network_private: it had no network; False where the system does not allow that.
    """

    passed: bool
    reason: str
    output: str
    seconds: float
    network_private: bool


def run_program(program: str, *, seconds: float = TIME_LIMIT, memory: int = MEMORY_LIMIT) -> Outcome:
    """Run a program with this interpreter, isolated from its environment and packages of the user.

    Args:
        program: Python source. It passes if it runs to its end without an exception; leaving earlier, by whatever exit,
            does not count.
        seconds: limit of wall-clock time.
        memory: limit of the address space, bytes.

    Raises:
        NotImplementedError: the system cannot limit a process as needed.
    """
    if not hasattr(os, "waitid"):
        raise NotImplementedError("generated programs are run only where their limits hold: use Linux")
    word = secrets.token_hex(16)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="oscar-sandbox-", ignore_cleanup_errors=True) as folder:
        verdict, verdict_end = os.pipe()
        task = {
            "program": program,
            "word": word,
            "verdict": verdict_end,
            "memory": memory,
            "seconds": int(seconds) + 1,
            "file": FILE_LIMIT,
        }
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", "-c", _CHILD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=(verdict_end,),
                start_new_session=True,
            )
            os.close(verdict_end)
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                _give(child.stdin.fileno(), json.dumps(task).encode() + b"\n")
                output, ended = _watch(child, child.stdout.fileno(), began + seconds)
            finally:
                _kill_group(child)
                child.stdin.close()
                child.stdout.close()
            said = _read_now(verdict)
        finally:
            os.close(verdict)
    spent = time.monotonic() - began
    text = output.decode("utf-8", errors="replace")
    result = _parse(said)
    private = bool(result.get("private"))
    if not ended:
        return Outcome(False, "timed out", text, spent, private)
    if secrets.compare_digest(str(result.get("passed", "")), word):
        return Outcome(True, "passed", text, spent, private)
    reason = result.get("reason") or f"ended early with status {child.returncode}"
    return Outcome(False, str(reason), text, spent, private)


def _give(pipe: int, data: bytes) -> None:
    """Write everything; a child that is gone already shows in its verdict."""
    try:
        while data:
            data = data[os.write(pipe, data) :]
    except BrokenPipeError:
        pass


def _watch(child: subprocess.Popen[bytes], pipe: int, until: float) -> tuple[bytes, bool]:
    """What the child prints, cut, until it ends or time is up; whether it ended. Reads on, so that it never blocks."""
    kept = b""
    while True:
        ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        left = until - time.monotonic()
        if not ended and left <= 0:
            return kept, False
        ready, _, _ = select.select([pipe], [], [], 0.0 if ended else min(left, 0.02))
        if ready:
            data = os.read(pipe, 1 << 16)
            kept += data[: max(0, OUTPUT_LIMIT - len(kept))]
            if not data and not ended:
                time.sleep(0.005)  # closed its output, still running
            if data and time.monotonic() < until:
                continue
        if ended:
            return kept, True


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and all it started; its process group is named after it, since it leads its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # the child is not waited for yet, so that its number is still its own
    child.wait()


def _read_now(pipe: int) -> bytes:
    """What lies in a pipe, without waiting for writers that may be left."""
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, 1 << 16)
    except BlockingIOError:
        return b""


def _parse(said: bytes) -> dict[str, object]:
    try:
        result = json.loads(said)
    except ValueError:
        return {}
    return result if isinstance(result, dict) else {}
