"""Decoding from a graph. The bookkeeping around the capture runs everywhere, with a stand-in that repeats the call; the capture
itself needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from caching import SMALL, artifact_for, generate, prompt
from models import tiny_model
from test_oscar_cache import padded
from transformers.modeling_outputs import CausalLMOutputWithPast

from oscar_kv import OscarConfig, cuda_graphs
from oscar_kv.integrations import graphs
from oscar_kv.integrations.transformers import OscarCache


class Recorder:
    """In place of a graph: a capture advances the host and does nothing else; a replay runs the step on the static inputs."""

    def __init__(self, cache: OscarCache) -> None:
        self.cache = cache
        self.captures = self.replays = 0

    def capture(self, function: Any) -> tuple[Any, Any]:
        self.captures += 1
        graphs._Step._advance(self.cache, self.index)
        output = CausalLMOutputWithPast(logits=torch.zeros(1))  # filled by each replay

        def replay() -> None:
            self.replays += 1
            graphs._Step._rewind(self.cache, self.index, self.cache.get_seq_length() - 1)
            output.logits = function().logits

        return replay, output

    @property
    def index(self) -> Any:
        return next(iter(self.cache.indices.by_device.values()))


@pytest.fixture
def _cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "GRAPHED", ("cuda", "cpu"))


@pytest.mark.usefixtures("_cpu_too")
@pytest.mark.parametrize("lengths", [[20], [5, 21]], ids=["one", "padded"])
@pytest.mark.parametrize("room", [64, 0], ids=["room", "growing"])
def test_replayed_steps_are_the_eager_ones(lengths: list[int], room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    artifact = artifact_for(model)
    ids, mask = padded(lengths)
    plain = generate(model, ids, OscarCache(artifact, model, kernels="reference"), 30, attention_mask=mask)
    cache = OscarCache(artifact, model, kernels="reference", max_tokens=room)
    recorder = Recorder(cache)
    monkeypatch.setattr(graphs, "capture", recorder.capture)
    with cuda_graphs(model):
        ours = generate(model, ids, cache, 30, attention_mask=mask)
    assert torch.equal(ours, plain)
    assert "forward" not in vars(model)
    assert cache.get_seq_length() == max(lengths) + 29
    if room:
        assert (recorder.captures, recorder.replays) == (1, 28)  # the first step is eager
    else:
        assert recorder.captures >= 1
        assert recorder.replays < 28  # steps that grow the cache, and the first after them, are eager


def test_what_is_no_step_runs_as_always() -> None:
    model = tiny_model("llama")
    artifact = artifact_for(model)
    ids = prompt(20)
    with cuda_graphs(model):
        assert torch.equal(generate(model, ids, OscarCache(artifact, model)), generate(model, ids, OscarCache(artifact, model)))
        model(input_ids=ids)
    assert graphs.why_not(OscarCache(artifact, model)).startswith("some layers")
    cache = OscarCache(artifact, model, kernels="reference")
    assert graphs.why_not(cache) == "it is empty"
    generate(model, ids, cache, 3)
    assert graphs.why_not(cache) == "it is on cpu"


@pytest.mark.usefixtures("_cpu_too")
def test_an_interrupted_capture_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    artifact = artifact_for(model)
    cache = OscarCache(artifact, model, kernels="reference", max_tokens=64)
    ids = prompt(22)
    extra: dict[str, Any] = {graphs.cache_argument(type(model).forward): cache, "use_cache": True}

    def fail(function: Any) -> Any:
        for layer in list(cache.layers)[:1]:
            layer.store.length += 1
        raise KeyboardInterrupt

    def step(at: int) -> torch.Tensor:
        return model(input_ids=ids[:, at : at + 1], position_ids=torch.tensor([[at]]), **extra).logits

    with torch.no_grad():
        model(input_ids=ids[:, :20], position_ids=torch.arange(20)[None], **extra)
        with cuda_graphs(model):
            step(20)
            monkeypatch.setattr(graphs, "capture", fail)
            with pytest.raises(KeyboardInterrupt):
                step(21)
        last = step(21)
        whole = OscarCache(artifact, model, kernels="reference")
        extra[graphs.cache_argument(type(model).forward)] = whole
        model(input_ids=ids[:, :20], position_ids=torch.arange(20)[None], **extra)
        step(20)
        assert torch.equal(last, step(21))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("lengths", [[700], [90, 700]], ids=["one", "padded"])
def test_a_real_graph_generates_what_eager_decoding_does(lengths: list[int]) -> None:
    model = tiny_model("llama").to("cuda", torch.bfloat16)
    config = OscarConfig(sink=SMALL.sink * 4, recent=32, slack=16, page_size=64, group_size=-1)
    artifact = artifact_for(model, config)
    ids, mask = (x.cuda() for x in padded(lengths))
    kernels = "triton"
    plain = generate(model, ids, OscarCache(artifact, model, kernels=kernels, max_tokens=800), 60, attention_mask=mask)
    with cuda_graphs(model):
        ours = generate(model, ids, OscarCache(artifact, model, kernels=kernels, max_tokens=800), 60, attention_mask=mask)
    assert torch.equal(ours, plain)
