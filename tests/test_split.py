"""What a calibration asks for and what it uses: token budgets, sequence lengths, and windows that share no token."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tiny_config, tiny_model, tiny_tokenizer

from oscar_kv.artifact import Artifact
from oscar_kv.calibration.corpus import Text, window_starts, windows_beside
from oscar_kv.calibration.run import calibrate
from oscar_kv.calibration.split import fit_lengths, split_sequences
from oscar_kv.config import OscarConfig
from oscar_kv.errors import InputError
from oscar_kv.geometry import model_geometry

QUICK = OscarConfig(tokens=1024, seq_len=256, sink=4, recent=16, selection_windows=1)


class Counting:
    """A tokenizer whose tokens are their own positions in the text, so that windows can be told apart; ``[-1]`` comes first."""

    def __init__(self, first: bool = True) -> None:
        self.first = [-1] if first else []

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        return {"input_ids": (self.first if add_special_tokens else []) + list(range(len(text)))}


# -- budgets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "seq_len", "positions", "used", "length"),
    [
        (1024, 256, 4096, 1024, 256),
        (1000, 256, 4096, 1024, 256),
        (1100, 256, 4096, 1024, 256),
        (1153, 256, 4096, 1280, 256),
        (300, 256, 4096, 256, 256),
        (1024, 512, 128, 1024, 128),
        (1000, 512, 128, 1024, 128),
        (200, 256, 4096, 200, 200),
    ],
    ids=[
        "exact",
        "rounded-up",
        "rounded-down",
        "above-the-half",
        "little-more-than-one",
        "beyond-positions",
        "both",
        "fewer-than-one",
    ],
)
def test_budget_is_recorded_as_used_and_warned_about_where_it_is_not_as_asked(
    tokens: int, seq_len: int, positions: int, used: int, length: int, tmp_path
) -> None:
    model = tiny_model("llama", max_position_embeddings=positions)
    config = QUICK.with_(tokens=tokens, seq_len=seq_len)
    artifact = calibrate(model, tiny_tokenizer(), method="none", text=Text("mine", "abcdefg " * 400), config=config)
    artifact = Artifact.load(artifact.save(tmp_path / "a"))
    by = artifact.provenance
    assert (by["tokens"], by["tokens_asked"], by["seq_len"], by["seq_len_asked"]) == (used, tokens, length, seq_len)
    assert (artifact.config.tokens, artifact.config.seq_len) == (used, length)
    about_tokens = [w for w in by["warnings"] if w.startswith(f"{tokens} calibration tokens were asked for, {used} are used")]
    about_length = [w for w in by["warnings"] if w.startswith(f"sequences of {seq_len} tokens were asked for, {length} are")]
    assert len(about_tokens) == (used != tokens)
    assert len(about_length) == (length != seq_len)
    if length == positions:
        assert f"the model has {positions} positions" in about_length[0]


def test_too_few_tokens_after_rounding_are_refused_too() -> None:
    geometry = model_geometry(tiny_config("llama"))
    with pytest.raises(InputError, match=r"60 tokens are too few .* at least 64"):
        fit_lengths(QUICK.with_(tokens=80, seq_len=60), geometry, tiny_config("llama"))
    with pytest.raises(InputError, match="nothing beyond the 256 sink tokens"):
        fit_lengths(QUICK.with_(sink=256), geometry, tiny_config("llama"))


def test_auto_without_a_selection_window_is_refused() -> None:
    with pytest.raises(InputError, match="at least one selection window"):
        calibrate(tiny_model("llama"), tiny_tokenizer(), config=QUICK.with_(selection_windows=0))
    artifact = calibrate(tiny_model("llama"), tiny_tokenizer(), method="none", config=QUICK.with_(selection_windows=0))
    assert artifact.fidelity["windows"] == 1


# -- who sees which token ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False], ids=["bos", "no-bos"])
@pytest.mark.parametrize("windows", [0, 1, 2, 3])
@pytest.mark.parametrize("length", [1024, 1600, 2000, 2600, 5000])
def test_no_token_of_a_text_serves_two_ends(length: int, windows: int, first: bool) -> None:
    config = QUICK.with_(selection_windows=windows)
    parts = split_sequences(Text("mine", "a" * length), Counting(first), config, builtin=False)
    seen: set[tuple[str, int]] = set()
    groups = (("mine", parts.train), (parts.selection_text, parts.selection), (parts.fidelity_text, parts.fidelity))
    assert len(parts.train) == 4
    assert (len(parts.selection), len(parts.fidelity)) == (windows, max(1, windows))
    for name, group in groups:
        text = name.split(" ")[0]
        for window in group:
            tokens = window.tolist()
            assert len(tokens) == 256
            assert tokens[: len(Counting(first).first)] == Counting(first).first
            found = {(text, t) for t in tokens if t >= 0}
            assert len(found) == 256 - first
            assert not found & seen
            seen |= found
    room = length // (256 - first) - 4
    assert (parts.fidelity_text == "mine (part not used for calibration)") == (room >= windows + max(1, windows))


@given(
    total=st.integers(10, 400),
    length=st.integers(4, 120),
    taken=st.integers(0, 3),
    count=st.integers(1, 4),
    first=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_windows_beside_others_never_touch_them(total: int, length: int, taken: int, count: int, first: bool) -> None:
    start = [-1] if first else []
    body = length - len(start)
    if body * taken > total:
        return
    starts = window_starts(total, body, taken) if taken else []
    free = set(range(total)) - {s + i for s in starts for i in range(body)}
    longest = max((len(list(run)) for on, run in itertools.groupby(range(total), lambda t: t in free) if on), default=0)
    try:
        windows = windows_beside(torch.arange(total), length, count, starts, start, least=3)
    except InputError:
        assert longest < min(body, 3)
        return
    assert 1 <= len(windows) <= count
    sizes = {len(w) - len(start) for w in windows}
    assert sizes == {min(body, longest)}
    tokens = [t for w in windows for t in w.tolist()[len(start) :]]
    assert len(set(tokens)) == len(tokens)
    assert set(tokens) <= free
    for w in windows:
        assert w.tolist()[len(start) :] == list(range(int(w[-1]) - min(body, longest) + 1, int(w[-1]) + 1))


def test_fewer_and_shorter_fidelity_windows_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oscar_kv.calibration.split.builtin_text", lambda part: Text(f"builtin:{part}", "abcdefgh" * 100))
    config = QUICK.with_(selection_windows=2, tokens=1024, seq_len=320)
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    artifact = calibrate(model, tokenizer, method="hadamard", text=Text("mine", "abcdefg " * 130), config=config)
    found = artifact.fidelity
    assert (found["text"], found["windows"], found["length"]) == ("builtin:selection", 1, 800 - 2 * 319 + 1)
    assert any("on 1 window of 163 tokens instead of 2 of 320" in w for w in artifact.provenance["warnings"])
    with pytest.raises(InputError, match="no room for another"):
        calibrate(model, tokenizer, method="hadamard", text=Text("mine", "abcdefg " * 130), config=config.with_(seq_len=400))


def test_a_model_that_gives_nan_on_held_out_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oscar_kv.calibration.run.figures", lambda *_: {"kl_mean": float("nan")})
    with pytest.raises(InputError, match="NaN or infinity on builtin:selection in float32"):
        calibrate(tiny_model("llama"), tiny_tokenizer(), method="none", config=QUICK)
