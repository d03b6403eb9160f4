"""Selection: local errors against a naive computation, and no setting chosen on numbers that are none."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import random_transform
from models import tiny_model

from oscar_kv.attention import intercepted
from oscar_kv.calibration import capture as capturing
from oscar_kv.calibration import select as selecting
from oscar_kv.calibration.capture import capture_moments
from oscar_kv.calibration.methods import ALLOCATED, EVEN
from oscar_kv.config import OscarConfig
from oscar_kv.errors import InputError
from oscar_kv.geometry import model_geometry
from oscar_kv.method.selection import local_errors


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["no-cap", "cap"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["no-sinks", "sinks"])
def test_local_errors_equal_a_naive_loop(softcap: float | None, with_sinks: bool) -> None:
    g = torch.Generator().manual_seed(3)
    heads, group, tokens, dim = 2, 3, 23, 16
    query = torch.randn(heads * group, tokens, dim, generator=g)
    key, value = (torch.randn(heads, tokens, dim, generator=g) for _ in range(2))
    metric = torch.randn(heads, dim, dim, generator=g).double()
    metric = metric @ metric.mT
    sinks = torch.randn(heads * group, generator=g) if with_sinks else None
    rows = torch.tensor([7, 15, 22])
    dense = torch.rand(3, tokens, generator=g) < 0.3
    candidate = random_transform(heads, dim, dim, seed=1)
    got_key, got_value = local_errors(
        query, key, value, [candidate], metric, rows, dense, scaling=0.3, softcap=softcap, sinks=sinks
    )
    coded_key, coded_value = candidate.requantize(key, value)
    for h in range(heads):
        key_error = value_error = signal = 0.0
        for j in range(group):
            for s, row in enumerate(rows.tolist()):
                q = query[h * group + j, row].double()

                def attend(
                    keys: torch.Tensor, values: torch.Tensor, q: torch.Tensor = q, h: int = h, j: int = j
                ) -> torch.Tensor:
                    logits = keys.double() @ q * 0.3
                    if softcap:
                        logits = softcap * torch.tanh(logits / softcap)
                    weights = logits.exp()
                    extra = sinks[h * group + j].double().exp() if sinks is not None else 0.0
                    return (weights / (weights.sum() + extra)) @ values.double()

                k, v = key[h, : row + 1], value[h, : row + 1]
                ck = torch.where(dense[s, : row + 1, None], k, coded_key[h, : row + 1])
                cv = torch.where(dense[s, : row + 1, None], v, coded_value[h, : row + 1])
                exact = attend(k, v)
                for name, error in (("k", attend(ck, v) - exact), ("v", attend(k, cv) - exact), ("s", exact)):
                    size = float(error @ metric[h] @ error)
                    key_error += size if name == "k" else 0.0
                    value_error += size if name == "v" else 0.0
                    signal += size if name == "s" else 0.0
        assert float(got_key[0, h]) == pytest.approx(key_error / signal, rel=1e-3)
        assert float(got_value[0, h]) == pytest.approx(value_error / signal, rel=1e-3)


def test_a_head_without_energy_does_not_decide() -> None:
    """The trellis cannot store zeros: relative to an output of nothing, its error is without bound."""
    g = torch.Generator().manual_seed(3)
    tokens, dim = 40, 16
    query, key, value = (torch.randn(2, tokens, dim, generator=g) for _ in "qkv")
    value[1] = 0.0
    good = random_transform(2, dim, dim, seed=1, name="trellis")
    skewed = torch.eye(dim) * torch.logspace(0, 2, dim)
    bad = replace(  # worse where there is energy, better where there is none
        good,
        value_in=torch.stack([skewed, torch.eye(dim)]),
        output_out=torch.stack([torch.linalg.inv(skewed), torch.eye(dim)]),
        value_mean=torch.zeros(2, dim),
    )
    rows = torch.tensor([20, 39])
    dense = torch.arange(tokens) > rows[:, None] - 4
    metric = torch.eye(dim).double().expand(2, dim, dim)
    errors = local_errors(query, key, value, [good, bad], metric, rows, dense, scaling=0.3)
    for error in errors:
        assert float(error.max()) <= 1.0
    value_error = errors[1]
    assert value_error[0, 0] < 0.5 * value_error[1, 0]
    assert value_error[0].mean() < value_error[1].mean()


def test_an_error_that_is_no_number_stays_one() -> None:
    """The bound must not make a candidate that overflows look no worse than one that is merely bad."""
    query, key, value = (torch.randn(2, 20, 16) for _ in "qkv")
    good = random_transform(2, 16, 16)
    broken = replace(good, output_out=torch.full((2, 16, 16), math.inf))
    rows = torch.tensor([19])
    dense = torch.arange(20) > rows[:, None] - 4
    metric = torch.eye(16).double().expand(2, 16, 16)
    error = local_errors(query, key, value, [good, broken], metric, rows, dense, scaling=0.3)[1]
    assert torch.isfinite(error).tolist() == [[True, True], [False, False]]


def small_case() -> tuple[Any, list[torch.Tensor], Any, OscarConfig]:
    model = tiny_model("llama")
    config = OscarConfig(sink=4, recent=8, slack=0, seq_len=48)
    windows = [torch.randint(1, 256, (48,), generator=torch.Generator().manual_seed(i)) for i in range(6)]
    return model, windows[4:], capture_moments(model, windows[:4], model_geometry(model.config), config), config


def test_a_setting_whose_kl_is_no_number_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, held, moments, config = small_case()
    usual, poisoned = selecting.compare, []

    def compare(model: Any, tokens: Any, methods: Any, *args: Any, **kwargs: Any) -> Any:
        result = usual(model, tokens, methods, *args, **kwargs)
        first = next(iter(result))
        result[first].kl = torch.full_like(result[first].kl, math.nan)
        poisoned.append(first)
        return result

    monkeypatch.setattr(selecting, "compare", compare)
    selection = selecting.select(model, held, moments, config)
    assert poisoned
    assert selection.tried[0]["setting"] not in poisoned
    assert math.isfinite(selection.tried[0]["kl_mean"])


def test_nothing_is_chosen_where_every_setting_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model, held, moments, config = small_case()
    monkeypatch.setattr(selecting, "mean_kl", lambda metrics: math.nan)
    with pytest.raises(InputError, match="no setting gives finite predictions"):
        selecting.select(model, held, moments, config)


def test_autocast_reaches_neither_weights_nor_local_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    model, held, moments, config = small_case()
    seen: list[tuple[str, bool]] = []
    for module, name in ((capturing, "read_weights"), (selecting, "local_errors")):
        usual = getattr(module, name)

        def watched(*args: Any, name: str = name, usual: Any = usual, **kwargs: Any) -> Any:
            seen.append((name, torch.is_autocast_enabled("cpu")))
            return usual(*args, **kwargs)

        monkeypatch.setattr(module, name, watched)
    layers = {i: random_transform(2, 16, seed=i) for i in moments}
    with torch.autocast("cpu", torch.bfloat16):
        capture_moments(model, held[:1], model_geometry(model.config), config)
        selecting.measure_local(model, held[:1], [0], moments, [layers], config)
        assert torch.is_autocast_enabled("cpu")
    assert seen == [("read_weights", False)] * 2 + [("local_errors", False)] * 2


def test_observers_see_their_own_model_only() -> None:
    models = [tiny_model("llama"), tiny_model("llama")]
    seen: list[list[int]] = [[], []]

    def observer(number: int) -> Any:
        def observe(call: Any) -> Any:
            seen[number].append(call.module.layer_idx)
            return call.base()

        return observe

    ids = torch.tensor([[1, 2, 3]])
    with intercepted(models[0], observer(0)):
        with intercepted(models[1], observer(1)):
            models[0](input_ids=ids)
            models[1](input_ids=ids)
        models[0](input_ids=ids)
        with pytest.raises(RuntimeError, match="already"), intercepted(models[0], observer(1)):
            pass
        models[0](input_ids=ids)
    models[0](input_ids=ids)
    assert seen == [[0, 1] * 3, [0, 1]]


def test_finalists_are_the_best_of_each_kind_and_then_the_next_best() -> None:
    choices = EVEN
    error = torch.arange(9.0)  # plain 0..2, centred 3..5, centred and read 6..8
    assert selecting.finalists(error, choices, 3) == [0, 3, 6]
    two_kinds = tuple(c for c in choices if not c.read)
    assert selecting.finalists(torch.tensor([5.0, 1, 2, 4, 3, 6]), two_kinds, 3) == [1, 2, 4]


def test_the_standing_key_setting_is_a_finalist_whatever_its_local_error() -> None:
    standing = ALLOCATED.index(selecting.STANDING)
    error = torch.ones(len(ALLOCATED))
    error[standing] = 5.0
    assert len(set(selecting.finalists(error, ALLOCATED, 2))) == 3
    assert selecting.finalists(error, ALLOCATED, 2)[-1] == standing
    error[standing] = 0.0
    assert selecting.finalists(error, ALLOCATED, 2)[0] == standing
    assert len(selecting.finalists(error, ALLOCATED, 2)) == 2
