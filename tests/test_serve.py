"""``oscar serve``: the line it builds, what it refuses, and that it becomes the engine."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from caching import artifact_for
from commands import run
from models import save_tiny, tiny_model

from oscar_kv.integrations.vllm.settings import Settings


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model's folder and its artifact's."""
    root = tmp_path_factory.mktemp("serve")
    artifact_for(tiny_model()).save(root / "llama.oscar")
    return Path(save_tiny(root / "llama")), root / "llama.oscar"


def printed(*args: object) -> list[str]:
    return shlex.split(run("serve", "--print", *args).stdout)


def settings_in(line: list[str]) -> Settings:
    return Settings.read(json.loads(line[line.index("--additional-config") + 1]))


def test_the_line_for_vllm_names_backend_and_artifact_and_keeps_further_flags(llama):
    model, artifact = llama
    line = printed(model, "--artifact", artifact, "--sink", 8, "--", "--port", "8001", "--max-model-len=512")
    assert line[:3] == ["vllm", "serve", str(model)]
    assert line[line.index("--attention-backend") + 1] == "CUSTOM"
    assert settings_in(line) == Settings(str(artifact.resolve()), sink=8)
    assert line[-3:] == ["--port", "8001", "--max-model-len=512"]
    assert "--attention-config" not in line


def test_the_artifact_is_named_by_its_whole_path(llama, monkeypatch):
    model, artifact = llama
    monkeypatch.chdir(artifact.parent)
    assert settings_in(printed(model, "--artifact", artifact.name)).artifact == str(artifact.resolve())


def test_sliding_layers_go_to_a_stock_backend(tmp_path):
    artifact_for(tiny_model("gemma3")).save(tmp_path / "artifact")
    line = printed(save_tiny(tmp_path / "gemma", "gemma3"), "--artifact", tmp_path / "artifact")
    kinds = json.loads(line[line.index("--attention-config") + 1])["backend_per_kind"]
    assert set(kinds) == {"sliding_window"}
    assert kinds["sliding_window"] in ("FLASH_ATTN", "CPU_ATTN")


def test_the_line_for_sglang_passes_the_artifact_in_a_variable(llama):
    model, artifact = llama
    line = printed(model, "--artifact", artifact, "--engine", "sglang", "--", "--port", "8002")
    assert line[0] == f"OSCAR_KV_ARTIFACT={artifact.resolve()}"
    assert line[2:6] == ["-m", "sglang.launch_server", "--model-path", str(model)]
    assert line[6:] == ["--kv-cache-dtype", "oscar_int2", "--attention-backend", "oscar_int2", "--port", "8002"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--engine", "tgi"], ["'tgi'", "vllm, sglang"]),
        (["--engine", "sglang", "--sink", "4"], ["--sink", "--engine vllm"]),
        (["--", "--additional-config", "{}"], ["--additional-config", "--print"]),
        (["--", "--attention-backend=FLASH_ATTN"], ["--attention-backend", "--print"]),
    ],
)
def test_what_cannot_be_asked_for_is_refused_in_one_line(llama, args, words):
    model, artifact = llama
    error = run("serve", model, "--artifact", artifact, *args, status=2).stderr
    assert len(error.strip().splitlines()) == 1
    for word in words:
        assert word in error


def test_another_models_artifact_is_refused_before_the_engine_starts(llama, tmp_path):
    other = save_tiny(tmp_path / "other", head_dim=32)
    error = run("serve", other, "--artifact", llama[1], status=2).stderr
    assert "made for another model" in error
    assert "key_dim" in error


def test_it_becomes_the_engine(llama, tmp_path):
    model, artifact = llama
    engine = tmp_path / "vllm"
    engine.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\nsys.exit(7)\n")
    engine.chmod(engine.stat().st_mode | stat.S_IXUSR)
    command = [sys.executable, "-m", "oscar_kv.cli", "serve", model, "--artifact", artifact, "--", "--port", "8001"]
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path}, check=False)
    assert done.returncode == 7, done.stderr
    assert json.loads(done.stdout)[-2:] == ["--port", "8001"]
    assert shlex.split(done.stderr.strip().splitlines()[-1])[1:] == json.loads(done.stdout)


def test_an_engine_that_is_not_installed(llama, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    model, artifact = llama
    error = run("serve", model, "--artifact", artifact, status=2).stderr
    assert "pip install 'oscar-kv[vllm]'" in error
