"""Loading: what a model is called afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import save_tiny, tiny_model, tiny_tokenizer

from oscar_kv.calibration.run import calibrate
from oscar_kv.config import OscarConfig
from oscar_kv.loading import load_model

QUICK = OscarConfig(tokens=256, seq_len=128, sink=4, recent=16, selection_windows=1)


def recorded(model: object) -> str:
    return str(calibrate(model, tiny_tokenizer(), method="none", config=QUICK).provenance["model"])


def test_a_gguf_file_is_recorded_by_its_own_name_not_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers notes the folder in which the file lies, as it is what ``from_pretrained`` was given."""
    file = tmp_path / "downloads" / "some-model.Q8_0.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUF")

    def read(source: str, **_: object) -> object:
        model = tiny_model("llama")
        model.config._name_or_path = source
        return model

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", read)
    assert recorded(load_model(str(file), device="cpu")) == "some-model.Q8_0.gguf"


def test_a_folder_is_recorded_by_its_name(tmp_path: Path) -> None:
    assert recorded(load_model(str(save_tiny(tmp_path / "tiny-llama")), device="cpu")) == "tiny-llama"
