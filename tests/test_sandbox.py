"""Generated programs: only one that runs to its end passes, and none outlives its limits."""

from __future__ import annotations

import os
import time

import pytest

from oscar_kv.evaluate.sandbox import OUTPUT_LIMIT, run_program

CHECK = "\n\ndef check(f):\n    assert f(2) == 4\n\ncheck(square)\n"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def square(x):\n    return x + 1\n", "AssertionError"),
        ("def square(x:\n", "SyntaxError"),
        ("def square(x):\n    return y\n", "NameError"),
        ("import sys\nsys.exit(0)\ndef square(x): return x * x\n", "SystemExit: 0"),
        ("def square(x):\n    exit(0)\n", "NameError|SystemExit"),
        ("import os\nos._exit(0)\ndef square(x): return x * x\n", "ended early with status 0"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", "ended early with status -9"),
        ("def square(x):\n    raise KeyboardInterrupt\n", "KeyboardInterrupt"),
        ("def square(x):\n    return square(x)\n", "RecursionError"),
    ],
    ids=["wrong", "syntax", "name", "sys_exit", "exit_inside", "os_exit", "killed", "interrupt", "recursion"],
)
def test_what_does_not_reach_its_end_does_not_pass(program, reason):
    outcome = run_program(program + CHECK)
    assert not outcome.passed
    assert any(part in outcome.reason for part in reason.split("|"))
    assert outcome.seconds < 9


def test_right_program_passes_and_its_output_is_kept():
    outcome = run_program("def square(x):\n    print('at', x)\n    return x * x\n" + CHECK)
    assert (outcome.passed, outcome.reason, outcome.output) == (True, "passed", "at 2\n")


def test_printing_success_is_not_success():
    outcome = run_program("print('{\"passed\": true}')\nimport os\nos._exit(0)\n")
    assert not outcome.passed


def test_writing_a_verdict_is_not_success():
    forged = (
        'import os, json\nfor n in range(3, 64):\n    try:\n        os.write(n, b\'{"passed": "1"}\')\n    except OSError:\n'
    )
    assert not run_program(forged + "        pass\nos._exit(0)\n").passed


@pytest.mark.parametrize(
    "program",
    ["while True:\n    pass\n", "while True:\n    print('x' * 1000)\n", "import time\ntime.sleep(60)\n"],
    ids=["loop", "printing", "sleep"],
)
def test_endless_programs_are_stopped(program):
    began = time.monotonic()
    outcome = run_program(program, seconds=1.0)
    assert (outcome.passed, outcome.reason) == (False, "timed out")
    assert time.monotonic() - began < 5
    assert len(outcome.output) <= OUTPUT_LIMIT


def test_except_in_the_program_does_not_catch_the_time_limit():
    program = "while True:\n    try:\n        while True: pass\n    except BaseException:\n        pass\n"
    assert run_program(program, seconds=1.0).reason == "timed out"


def test_memory_is_limited():
    outcome = run_program("x = bytearray(3 << 30)\n" + "y = 1\n")
    assert (outcome.passed, outcome.reason) == (False, "MemoryError: ")
    growing = run_program("x = []\nwhile True:\n    x.append(bytearray(1 << 24))\n", memory=256 << 20)
    assert "MemoryError" in growing.reason
    assert run_program("x = bytearray(100 << 20)\n").passed


def test_files_are_limited_and_gone(tmp_path):
    outcome = run_program("import os\nprint(os.getcwd())\nopen('a', 'wb').write(bytes(1000))\n")
    assert outcome.passed
    assert not os.path.exists(outcome.output.strip())
    big = run_program("open('a', 'wb').write(bytes(100 << 20))\n")
    assert not big.passed


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads /proc")
def test_forked_children_are_killed_and_have_no_say():
    program = "import os, time\nchild = os.fork()\nif not child:\n    time.sleep(60)\nprint(child, flush=True)\n"
    began = time.monotonic()
    outcome = run_program(program)
    assert outcome.passed
    assert time.monotonic() - began < 9  # does not wait for the child, which holds the output open
    for _ in range(100):
        if not alive(int(outcome.output)):
            break
        time.sleep(0.02)
    assert not alive(int(outcome.output))
    # the parent leaves, the child runs to the end: no verdict
    left = run_program("import os\nif os.fork():\n    os._exit(0)\n", seconds=3)
    assert not left.passed


def test_fork_bomb_is_stopped():
    bomb = "import os, time\nfor _ in range(5):\n    os.fork()\ntime.sleep(60)\n"
    outcome = run_program(bomb, seconds=2.0)
    assert (outcome.passed, outcome.reason) == (False, "timed out")


def test_environment_and_user_packages_are_not_seen(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_TESTER", "1")
    assert run_program("import os\nassert 'SECRET_OF_THE_TESTER' not in os.environ\n").passed


def test_no_network_where_the_system_allows_that():
    program = (
        "import socket\nwith socket.create_server(('127.0.0.1', 0)) as s:\n"
        "    socket.create_connection(s.getsockname(), timeout=1)\n"
    )
    outcome = run_program(program)
    assert outcome.passed is not outcome.network_private  # in a fresh namespace not even the loopback is up
