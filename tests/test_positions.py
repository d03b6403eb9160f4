"""Statistics at long positions: a sequence that begins later reads the same, at other rotary angles."""

from __future__ import annotations

import pytest
import torch
import transformers
from models import tiny_config, tiny_model

from oscar_kv.attention import intercepted
from oscar_kv.calibration.capture import capture_moments
from oscar_kv.calibration.split import position_offsets
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
