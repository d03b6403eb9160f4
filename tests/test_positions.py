"""Statistics at long positions: a sequence that begins later reads the same, at other rotary angles."""

from __future__ import annotations

import pytest
import torch
import transformers
from models import short_builtin_text, tiny_config, tiny_model, tiny_tokenizer

from oscar_kv.attention import intercepted
from oscar_kv.calibration.capture import capture_moments
from oscar_kv.calibration.run import calibrate
from oscar_kv.calibration.split import Split, position_offsets, position_warnings
from oscar_kv.config import OscarConfig
from oscar_kv.geometry import model_geometry
from oscar_kv.simulate import compare, hidden_states

CONFIG = OscarConfig(sink=4, recent=8)


def rotated(x: torch.Tensor, by: int, theta: float = 10_000.0) -> torch.Tensor:
    """Rotary embedding by ``by`` more positions, one plane after another, ``[..., D]``."""
    dim = x.shape[-1]
    out = x.clone()
    for i in range(dim // 2):
        angle = torch.tensor(by * theta ** (-2 * i / dim), dtype=torch.float64)
        a, b = x[..., i], x[..., i + dim // 2]
        out[..., i] = a * angle.cos() - b * angle.sin()
        out[..., i + dim // 2] = a * angle.sin() + b * angle.cos()
    return out


def test_offsets_turn_keys_and_change_no_output() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    tokens = torch.randint(1, 256, (40,), generator=torch.Generator().manual_seed(0))
    seen: dict[int, list[torch.Tensor]] = {}

    def observer(call):
        if call.module.layer_idx == 0:
            seen.setdefault(0, []).append(call.key[0].clone())
        return call.base()

    with intercepted(model, observer):
        near = hidden_states_within(model, tokens, 0)
        far = hidden_states_within(model, tokens, 1000)
    # transformers computes the angles in float32
    assert (near - far).abs().max() < 1e-3 * near.abs().max()
    first, second = seen[0]
    assert (rotated(first, 1000) - second).abs().max() < 1e-3 * first.abs().max()
    assert (first - second).abs().max() > 0.1 * first.abs().max()


def hidden_states_within(model, tokens: torch.Tensor, offset: int) -> torch.Tensor:
    from oscar_kv.attention import forward

    with torch.inference_mode():
        return forward(model.base_model, tokens, offset).last_hidden_state


def test_moments_cover_the_offsets() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    tokens = [torch.randint(1, 256, (40,), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    geometry = model_geometry(model.config)
    spread = capture_moments(model, tokens, geometry, CONFIG, offsets=[0, 2000])
    apart = [capture_moments(model, [t], geometry, CONFIG, offsets=[o]) for t, o in zip(tokens, (0, 2000), strict=True)]
    for i, m in spread.items():
        mean = (apart[0][i].key_second + apart[1][i].key_second) / 2
        assert torch.allclose(m.key_second, mean, rtol=1e-6, atol=1e-9)
        assert not torch.allclose(m.key_second, capture_moments(model, tokens, geometry, CONFIG)[i].key_second, rtol=1e-3)


def test_dense_results_do_not_depend_on_the_offset_of_a_window() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    tokens = torch.randint(1, 256, (40,), generator=torch.Generator().manual_seed(0))
    near, far = (compare(model, tokens, {"dense": None}, 4, 8, 10, offset=o)["dense"].nll[10:] for o in (0, 500))
    assert torch.allclose(near, far, atol=1e-3)
    assert hidden_states(model, tokens, None, 4, 8, 7).shape == (40, 64)


@pytest.mark.parametrize(
    ("count", "length", "positions", "limit", "expected"),
    [
        (4, 100, 1000, 4096, [0, 300, 600, 900]),
        (4, 100, 8000, 1000, [0, 300, 600, 900]),
        (1, 100, 1000, 4096, [0]),
        (3, 100, 0, 4096, [0, 0, 0]),
        (3, 100, 50, 4096, [0, 0, 0]),
        (2, 4096, 32768, 4096, [0, 0]),
    ],
)
def test_offsets_are_spread_over_what_the_model_takes(count, length, positions, limit, expected) -> None:
    config = OscarConfig(positions=positions)
    learned = transformers.GPT2Config(n_positions=4096)
    assert position_offsets(count, length, config, learned) == [0] * count
    assert position_offsets(count, length, config, tiny_config("llama", max_position_embeddings=limit)) == expected


STATISTICS = "statistics cover positions 0 to {} only, {} were asked for: one sequence of {} tokens; more --tokens"
SELECTION = "selection covers positions 0 to {} only, {} were asked for: one window of {} tokens; selection_windows of 2"


@pytest.mark.parametrize(
    ("tokens", "windows", "positions", "limit", "expected"),
    [
        (256, 1, 2000, 4096, [STATISTICS.format(255, 2000, 256), SELECTION.format(255, 2000, 256)]),
        (256, 2, 8000, 4096, [STATISTICS.format(255, 4096, 256)]),
        (1024, 1, 2000, 4096, [SELECTION.format(255, 2000, 256)]),
        (1024, 2, 2000, 4096, []),
        (256, 1, 0, 4096, []),
        (256, 1, 256, 4096, []),
        (256, 1, 2000, 256, []),
    ],
    ids=["one-of-each", "one-sequence", "one-window", "spread", "none-asked", "no-more-asked", "no-more-taken"],
)
def test_statistics_of_fewer_positions_than_asked_for_are_warned_about(tokens, windows, positions, limit, expected) -> None:
    config = OscarConfig(tokens=tokens, seq_len=256, sink=4, recent=16, selection_windows=windows, positions=positions)
    model = tiny_model("llama", max_position_embeddings=limit)
    with short_builtin_text():
        found = calibrate(model, tiny_tokenizer(), config=config).provenance["warnings"]
        plain = calibrate(model, tiny_tokenizer(), method="oscar", config=config).provenance["warnings"]
    said = [w for w in found if "were asked for: one" in w and not w.startswith("fidelity")]
    assert len(said) == len(expected)
    for warning, beginning in zip(said, expected, strict=True):
        assert warning.startswith(beginning)
    fidelity = [w for w in found if w.startswith("fidelity covers positions")]
    assert len(fidelity) == (windows == 1 and bool(expected))
    assert not any("cover" in w for w in plain)  # as published: all sequences at position 0


def test_learned_positions_are_told_to_begin_at_0() -> None:
    config = OscarConfig(positions=3000)
    windows = [torch.zeros(256), torch.zeros(256)]
    parts = Split(windows, windows, "a", windows, "b")
    learned = transformers.GPT2Config(n_positions=1024)
    found = position_warnings(parts, config, learned, selected=True)
    assert [w.split(" only, ")[1] for w in found] == ["1024 were asked for: learned positions always begin at 0"] * 3
    assert position_warnings(parts, config, transformers.GPT2Config(n_positions=256), selected=True) == []
