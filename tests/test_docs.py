"""What the README says is what the code does and what the result files hold."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from models import tiny_model, tiny_tokenizer

from oscar_kv.config import CODECS, DEFAULTS, OscarConfig
from oscar_kv.description import FORMAT_VERSION
from oscar_kv.evaluate.memory import footprint, human
from oscar_kv.geometry import model_geometry
from oscar_kv.method.codecs import CodecSpec

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def table(name: str) -> list[list[str]]:
    body = README.split(f"<!-- table: {name} -->")[1].split("<!-- end -->")[0]
    rows = [line for line in body.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def test_fault40_defaults_in_the_readme_are_the_defaults():
    names = {f.name for f in fields(OscarConfig)}
    seen = set()
    for setting, value, _ in table("defaults"):
        for name, v in zip(re.findall(r"`(\w+)`", setting), value.split(","), strict=True):
            default = getattr(DEFAULTS, name)
            assert type(default)(v.strip()) == default
            seen.add(name)
    shown = {"group_size", "sink", "recent", "slack", "tokens", "seq_len", "positions", "key_clip", "value_clip"}
    assert shown | {"key_codec", "value_codec"} == seen <= names


def test_savings_in_the_readme_are_the_formula():
    from transformers import Qwen3Config

    config = Qwen3Config(hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    geometry = model_geometry(config)
    for tokens, dense, packed, saving in table("savings"):
        f = footprint(geometry, DEFAULTS, int(tokens.replace(",", "")), 2)
        assert (human(f.dense), human(f.packed), f"{f.ratio:.1f} x") == (dense, packed, saving)


def test_accuracy_table_is_that_of_the_result_files():
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in README.splitlines() if line.count("|") == 11][2:]
    assert len(rows) == 8
    model = ""
    for row in rows:
        model = row[0].rstrip("³") or model
        text = "prose-dev" if row[1].startswith("prose") else "builtin-evaluation"
        data = json.loads((ROOT / "benchmarks" / "results" / f"fidelity-{model}-{text}.json").read_text())
        found = {r["method"]: r for r in data["results"]}
        assert (data["settings"]["windows"], data["settings"]["length"], data["settings"]["group_size"]) == (4, 4096, -1)
        naive, oscar, auto = (found[m]["kl_mean"] for m in ("naive", "oscar", "auto"))
        assert float(row[2]) == pytest.approx(naive, rel=0.005)
        assert float(row[3]) == pytest.approx(oscar, rel=0.005)
        even = min(r["kl_mean"] for m, r in found.items() if m.endswith("+search") and "/" not in m)
        assert float(row[4]) == pytest.approx(even, rel=0.005)
        assert float(row[5].strip("*")) == pytest.approx(auto, rel=0.005)
        assert float(row[6]) == pytest.approx(auto / oscar, rel=0.05)
        assert float(row[7].rstrip(" %")) == pytest.approx(100 * found["auto"]["top1_agreement"], abs=0.06)
        for shown, method in zip(row[8].split("/"), ("dense", "oscar", "auto"), strict=True):
            assert float(shown) == pytest.approx(found[method]["perplexity"], rel=0.005)
        if row[9]:
            assert float(row[9]) == pytest.approx(found["auto"]["bits_per_element_128k"], abs=0.005)


def test_promised_ratios_hold_in_the_result_files():
    worst = {"SmolLM2-135M": 0.20, "Gemma-3-270M": 0.05, "Qwen2.5-Coder-0.5B": 0.009, "Qwen2.5-Coder-1.5B": 0.005}
    for path in (ROOT / "benchmarks" / "results").glob("fidelity-*.json"):
        data = json.loads(path.read_text())
        kl = {r["method"]: r["kl_mean"] for r in data["results"]}
        assert kl["auto"] <= worst[data["model"]] * kl["oscar"], path.name
        fixed = [value for method, value in kl.items() if method.endswith("+search") and "/" not in method]
        assert not fixed or kl["auto"] <= 1.05 * min(fixed), path.name
        if data["model"].startswith("Qwen"):
            assert kl["oscar"] > 3, path.name


def test_the_six_lines_of_the_readme_run(tmp_path, monkeypatch):
    code = README.split("```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line.strip()]) == 6
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("oscar_kv.calibration.run.DEFAULTS", DEFAULTS)
    import oscar_kv.calibration.run as run

    def quick(model, tokenizer):
        small = DEFAULTS.with_(tokens=1024, seq_len=256, sink=4, recent=16, selection_windows=1)
        return run.calibrate(model, tokenizer, config=small)

    monkeypatch.setattr("oscar_kv.calibrate", quick, raising=False)
    model = tiny_model("llama")
    ids = torch.randint(1, 256, (1, 60))
    names = {"model": model, "tokenizer": tiny_tokenizer(), "inputs": {"input_ids": ids}}
    exec(compile(code, "README.md", "exec"), names)
    assert names["output"].shape == (1, 124)
    assert names["cache"].get_seq_length() == 123


def test_documents_that_the_readme_links_to_exist():
    links = re.findall(r"\]\(((?!http)[^)#]+)\)", README)
    assert len(links) > 8
    for link in links:
        assert (ROOT / link).exists(), link


def test_every_field_that_a_calibration_records_is_documented():
    from oscar_kv.calibration.run import calibrate

    config = DEFAULTS.with_(tokens=1024, seq_len=256, sink=4, recent=16, selection_windows=1)
    made = calibrate(tiny_model("llama"), tiny_tokenizer(), method="none", config=config)
    page = (ROOT / "docs" / "artifact.md").read_text(encoding="utf-8")
    lines = {line.split("|")[1].strip(" `"): line for line in page.splitlines() if line.startswith("| `")}
    for field in ("provenance", "fidelity"):
        for name in getattr(made, field):
            assert f"`{name}`" in lines[field], name
    assert f"| {FORMAT_VERSION}. Another version" in lines["format_version"]
    assert all(f"`{name}`" in page and f'"{name}"' in CodecSpec.__doc__ for name in CODECS)


def test_every_command_is_in_the_readme():
    from oscar_kv.cli import app

    shell = README.split("The same from the shell.")[1].split("```")[1]
    for command in app.registered_commands:
        assert f"oscar {command.name}" in shell, command.name
    for words in ("https://download.pytorch.org/whl/cpu", ".[gguf]", ".venv/bin/oscar", "--length N"):
        assert words in README.split("**What it costs.**")[0]


def test_figures_of_the_research_page_are_in_a_result_file_or_marked():
    """Every number with three or more decimals that looks like a KL."""
    page = (ROOT / "docs" / "research.md").read_text(encoding="utf-8")
    known = set()
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        rows = json.loads(path.read_text()).get("results", [])
        known |= {f"{row['kl_mean']:.4f}" for row in rows}
        known |= {f"{bucket['kl_mean']:.4f}" for row in rows for bucket in row["buckets"]}
        known |= {f"{row['bits_per_element_128k']:.3f}" for row in rows}
    loose = [n for n, mark in re.findall(r"(\d\.\d{3,4})(†?)", page) if not mark and n not in known]
    assert loose == []
