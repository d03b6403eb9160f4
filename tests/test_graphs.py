"""Decoding from a graph. The bookkeeping around the capture runs everywhere, with a stand-in that repeats the call; the capture
itself needs a GPU."""

from __future__ import annotations

import contextlib
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
    monkeypatch.setattr(graphs, "WAITING", ())


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


class Stepped:
    """A model within :func:`cuda_graphs` over a cache of 20 tokens, the stand-in in place of graphs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, batch: int = 1) -> None:
        self.model = tiny_model("llama", dtype=torch.float64)
        artifact = artifact_for(self.model)
        self.caches = [OscarCache(artifact, self.model, kernels="reference", max_tokens=64) for _ in range(2)]
        self.name = graphs.cache_argument(type(self.model).forward)
        self.recorder = Recorder(self.caches[0])
        monkeypatch.setattr(graphs, "capture", self.recorder.capture)
        self.ids = prompt(30, batch)
        with torch.no_grad():
            for cache in self.caches:
                self.model(input_ids=self.ids[:, :20], use_cache=True, **{self.name: cache})

    def __call__(self, at: int, cache: int = 0, **more: Any) -> Any:
        ids = more.pop("ids", self.ids)[:, at : at + 1]
        extra = {self.name: self.caches[cache], "use_cache": True, **more}
        return self.model(input_ids=ids, position_ids=torch.tensor([[at]]), **extra)

    def captured(self, until: int = 22) -> None:
        for at in range(20, until):
            self(at)

    def expected(self, until: int) -> torch.Tensor:
        """Logits of the step before ``until``, never from a graph."""
        forward = vars(self.model).pop("forward", None)
        last = [self(at, cache=1).logits for at in range(20, until)][-1]
        if forward is not None:
            self.model.forward = forward
        return last


@pytest.mark.usefixtures("_cpu_too")
def test_a_graph_of_inference_mode_serves_outside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = Stepped(monkeypatch)
    with cuda_graphs(stepped.model):
        with torch.inference_mode():
            stepped.captured()
        with torch.no_grad():
            assert torch.equal(stepped(22).logits, stepped.expected(23))
    assert stepped.recorder.replays == 2


@pytest.mark.usefixtures("_cpu_too")
def test_a_step_of_another_batch_is_refused_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = Stepped(monkeypatch, batch=2)
    with torch.no_grad(), cuda_graphs(stepped.model):
        stepped.captured()
        with pytest.raises(ValueError, match="batch of 2, got 1"):
            stepped(22, ids=prompt(30))


@pytest.mark.usefixtures("_cpu_too")
@pytest.mark.parametrize("where", ["between layers", "in the first"])
def test_what_an_interrupted_call_leaves_is_noticed(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = Stepped(monkeypatch)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    with torch.no_grad(), cuda_graphs(stepped.model):
        stepped.captured()
        if where == "between layers":
            hook = stepped.model.model.layers[0].mlp.register_forward_pre_hook(fail)
            with pytest.raises(MemoryError):
                stepped.model(input_ids=prompt(2), **{stepped.name: stepped.caches[0]})
            hook.remove()
            with pytest.raises(RuntimeError, match="interrupted between them"):
                stepped(22)
            return
        layer = stepped.caches[0].stores[0].paged
        monkeypatch.setattr(layer, "decode", fail)
        with pytest.raises(MemoryError):
            stepped(22, output_hidden_states=True)  # eager
        monkeypatch.delattr(layer, "decode")
        assert torch.equal(stepped(22).logits, stepped.expected(23))


@pytest.mark.usefixtures("_cpu_too")
def test_rows_that_are_padding_still_are_no_steps_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = Stepped(monkeypatch)
    ids, mask = padded([5, 25])
    position = (mask.cumsum(-1) - 1).clamp_min(0)
    outputs = []
    for cache in stepped.caches:
        cache.reset()
        with torch.no_grad(), cuda_graphs(stepped.model) if cache is stepped.caches[0] else contextlib.nullcontext():
            for lo, hi in ((0, 10), *((at, at + 1) for at in range(10, 25))):
                extra = {"attention_mask": mask[:, :hi], "position_ids": position[:, lo:hi], stepped.name: cache}
                last = stepped.model(input_ids=ids[:, lo:hi], use_cache=True, **extra).logits
        outputs.append(last)
    assert torch.equal(*outputs)
    assert stepped.recorder.captures == 1


@pytest.mark.usefixtures("_cpu_too")
@pytest.mark.parametrize("return_dict", [True, False])
def test_nothing_that_is_returned_changes_with_the_next_step(return_dict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = Stepped(monkeypatch)
    made = CausalLMOutputWithPast(logits=torch.zeros(3), hidden_states=(torch.zeros(2), torch.zeros(2)))
    static = made if return_dict else made.to_tuple()
    monkeypatch.setattr(graphs, "capture", lambda function: (lambda: None, static))
    with torch.no_grad(), cuda_graphs(stepped.model):
        stepped(20, return_dict=return_dict)
        returned = stepped(21, return_dict=return_dict)
    made.logits.add_(1)
    made.hidden_states[0].add_(1)
    logits, hidden = returned[0], returned[1] if not return_dict else returned.hidden_states
    assert not logits.any()
    assert not hidden[0].any()
    assert type(returned) is type(static)


@pytest.mark.usefixtures("_cpu_too")
def test_autocast_is_never_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = Stepped(monkeypatch)
    with torch.no_grad(), cuda_graphs(stepped.model), torch.autocast("cpu", dtype=torch.bfloat16):
        for at in range(20, 24):
            stepped(at)
    assert stepped.recorder.captures == 0


def test_kernels_that_wait_are_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "GRAPHED", ("cuda", "cpu"))
    stepped = Stepped(monkeypatch)
    assert "waits for the device" in graphs.why_not(stepped.caches[0])
    with torch.no_grad(), cuda_graphs(stepped.model):
        stepped.captured()
    assert stepped.recorder.captures == 0


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
