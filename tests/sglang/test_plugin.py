"""The plugin inside SGLang's own code, in this process: registration, command line, refusals, pool and CUDA-graph metadata."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import environment  # noqa: F401  (before anything of SGLang)
import pytest
import torch
from server import PAGE, RECENT, SINK, save, transforms
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, prepare_server_args
from zoo import good_pair

from oscar_kv.errors import InputError
from oscar_kv.integrations.sglang import hooks, plugin, signatures
from oscar_kv.integrations.sglang.serving import Serving
from oscar_kv.integrations.sglang.settings import Settings
from oscar_kv.rotationzoo import import_rotations

load_plugins()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugin")
    save(folder)
    return folder


@pytest.fixture(autouse=True)
def _artifact(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSCAR_KV_ARTIFACT", str(folder / "artifact"))


def resolved(args: ServerArgs) -> Any:
    """What will be done; releases from 0.5.19 on find out in a second step."""
    if not hasattr(args, "resolve_once"):
        return args
    args.resolve_once()
    return SimpleNamespace(**args.resolved_dict())


def arguments(folder: Path, **changes: Any) -> Any:
    plain = {"model_path": str(folder / "model"), "device": "cpu", "kv_cache_dtype": "oscar_int2"}
    return resolved(ServerArgs(**{**plain, "cuda_graph_backend_decode": "disabled", "grammar_backend": "none", **changes}))


def test_the_installed_release_is_known_and_every_hook_took() -> None:
    assert signatures.problem() == ""
    assert all(hasattr(signatures.resolve(target), "__wrapped__") for target in plugin.hooked())


def test_the_command_line_takes_one_flag_and_the_artifact(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSCAR_KV_ARTIFACT", "")
    monkeypatch.setenv("OSCAR_KV_RECENT", "")
    line = ["--model-path", str(folder / "model"), "--device", "cpu", "--cuda-graph-backend-decode", "disabled"]
    ours = ["--kv-cache-dtype", "oscar_int2", "--oscar-artifact", str(folder / "artifact"), "--oscar-recent", "128"]
    args = resolved(prepare_server_args([*line, *ours]))
    assert (args.attention_backend, args.page_size) == ("oscar_int2", 64)
    graphs = args.cuda_graph_config
    assert (graphs["prefill"]["backend"] if isinstance(graphs, dict) else graphs.prefill.backend) == "disabled"
    assert Settings.read(os.environ) == Settings(str(folder / "artifact"), recent=128)


def test_without_the_flag_nothing_changes(folder: Path) -> None:
    args = arguments(folder, kv_cache_dtype="auto", attention_backend="torch_native")
    assert (args.page_size, args.attention_backend) == (1, "torch_native")
    assert hooks.current() is None
    assert hooks.prefix_limit(7, SimpleNamespace(), 8) is None
    assert hooks.max_requests(lambda configurator, capacity: 5, None, 100) == 5


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"page_size": 1}, "a multiple of 16 tokens"),
        ({"attention_backend": "torch_native"}, "cannot read a 2-bit KV cache"),
        ({"enable_hierarchical_cache": True, "attention_backend": "oscar_int2"}, "--enable-hierarchical-cache"),
        ({"enable_streaming_session": True}, "--enable-streaming-session"),
    ],
)
def test_real_server_arguments_are_refused_with_the_reason(folder: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        arguments(folder, **changes)


def test_where_a_function_differs_nothing_is_registered(folder: Path) -> None:
    """SGLang then knows no such dtype and stops by itself."""
    spoil = "import sglang.srt.managers.schedule_batch as m; m.Req._compute_max_prefix_len = lambda self, length, more: length"
    code = (
        "import logging; logging.basicConfig(level='ERROR')\n"
        f"{spoil}\n"
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry; print('hooks', len(HookRegistry._hooks))\n"
        "from sglang.srt.server_args import prepare_server_args\n"
        f"prepare_server_args(['--model-path', {str(folder / 'model')!r}, '--kv-cache-dtype', 'oscar_int2'])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr[-2000:]
    assert "oscar-kv registers nothing" in result.stderr
    assert "invalid choice: 'oscar_int2'" in result.stderr
    assert "hooks 0" in result.stdout


def test_beam_search_is_refused_as_bad_parameters_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(hooks.SERVED, raising=False)
    params = SamplingParams(max_new_tokens=4)
    with suppress(AttributeError):  # releases without it
        params.beam_width = 3
    assert hooks.check_sampling(SimpleNamespace(beam_width=3), 256) is None
    arguments(folder)
    with pytest.raises(ValueError, match="beam search copies rows without their windows"):
        hooks.check_sampling(SimpleNamespace(beam_width=3), 256)
    hooks.check_sampling(SimpleNamespace(beam_width=None), 256)
    if getattr(params, "beam_width", None):
        with pytest.raises(ValueError, match="beam search"):
            params.verify(256)


# -- a backend without an engine ---------------------------------------------------------------------------------------

ROWS, TOKENS = 4, 256


def build(model_folder: Path, artifact: Path, **windows: int) -> Any:
    """Pools and backend as SGLang would build them, for three requests."""
    from transformers import AutoConfig

    from oscar_kv.integrations.sglang.backend import OscarBackend
    from oscar_kv.integrations.sglang.pool import OscarKVPool

    config = AutoConfig.from_pretrained(model_folder)
    model = SimpleNamespace(hf_config=config, num_attention_heads=4, num_hidden_layers=2, context_len=TOKENS)
    configurator = SimpleNamespace(model_config=model, model_dtype=torch.float32, device="cpu", page_size=PAGE)
    serving = Serving(Settings(str(artifact), **windows), configurator, 0, 1)
    serving.reserve(10**8, ROWS - 1)
    pool = serving.pool_class(OscarKVPool)(
        TOKENS * ROWS, page_size=PAGE, dtype=torch.uint8, head_num=2, head_dim=16, layer_num=2, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    rows = ReqToTokenPool(ROWS - 1, TOKENS, "cpu", False)
    runner = SimpleNamespace(
        token_to_kv_pool=pool,
        req_to_token_pool=rows,
        model=torch.nn.Module(),
        server_args=SimpleNamespace(enable_metrics=False),
    )
    return OscarBackend(runner, serving)


@pytest.fixture
def backend(folder: Path) -> Any:
    return build(folder / "model", folder / "artifact")


def step(backend: Any, lengths: list[int], padding: int = 0) -> SimpleNamespace:
    """A decoding batch: rows 1, 2, ... of these lengths, then padded entries as SGLang makes them."""
    for row in range(1, len(lengths) + 1):
        backend.req_to_token[row] = PAGE + (row - 1) * TOKENS + torch.arange(TOKENS)
    rows = torch.tensor([*range(1, len(lengths) + 1), *[0] * padding])
    seq_lens = torch.tensor([*lengths, *[1] * padding])
    slots = backend.req_to_token[rows, seq_lens - 1].long()
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE, batch_size=len(rows), req_pool_indices=rows, seq_lens=seq_lens, seq_lens_cpu=seq_lens,
        out_cache_loc=slots,
    )  # fmt: skip


def fill(backend: Any, layer: Any) -> None:
    torch.manual_seed(1)
    for tensor in (*backend.arena.key, *backend.arena.value):
        tensor.normal_()
    for pages in backend.pool.k_buffer:
        k, v = torch.randn(2, TOKENS * ROWS, 2, 16)
        backend.serving.layers[0].store(k, v, pages, torch.arange(TOKENS * ROWS))


@pytest.fixture
def layer() -> Any:
    sizes = {"tp_q_head_num": 4, "tp_k_head_num": 2, "qk_head_dim": 16, "v_head_dim": 16}
    return SimpleNamespace(layer_id=0, scaling=0.25, **sizes)


def test_graph_replay_equals_eager_and_leaves_live_slots_alone(
    backend: Any, layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured at batch 4, replayed with two requests at other lengths across block borders; padded entries write to row 0."""
    monkeypatch.setattr(backend.serving, "capturable", lambda: "")  # the kernels here could not be captured
    backend.init_cuda_graph_state(ROWS, ROWS)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    for row in (1, 2):
        backend.arena.windows.open([(row, [], 0)])
    backend.arena.set_rows([1, 2])
    static = step(backend, [10, 10], padding=2)  # what is captured reads these tensors
    backend.init_forward_metadata_out_graph(static, in_capture=True)
    captured = backend.batch
    for lengths in ([10, 80], [16, 17], [200, 49]):
        fill(backend, layer)
        q, k, v = torch.randn(4, 64), torch.randn(4, 2, 16), torch.randn(4, 2, 16)
        before = [t.clone() for t in (backend.pool.k_buffer[0], backend.arena.key[0], backend.arena.value[0])]
        eager = step(backend, lengths)
        backend.init_forward_metadata(eager)
        expected = backend.forward_decode(q[:2], k[:2], v[:2], layer, eager)
        after = [t.clone() for t in (backend.pool.k_buffer[0], backend.arena.key[0], backend.arena.value[0])]
        for tensor, old in zip((backend.pool.k_buffer[0], backend.arena.key[0], backend.arena.value[0]), before, strict=True):
            tensor.copy_(old)
        now = step(backend, lengths, padding=2)
        for name in ("seq_lens", "out_cache_loc"):
            getattr(static, name).copy_(getattr(now, name))
        backend.init_forward_metadata_out_graph(now)
        backend.batch = captured
        backend.init_forward_metadata_in_graph(static)  # the recorded part
        assert backend.batch.table.data_ptr() == backend.graph.table.data_ptr()
        found = backend.forward_decode(q, k, v, layer, static)
        assert torch.equal(found[:2], expected)
        assert torch.equal(backend.pool.k_buffer[0][1:], after[0][1:])  # page 0 is SGLang's own dummy
        live = torch.tensor([b for row in (1, 2) for b in backend.arena.windows.table_row(row)])
        assert torch.equal(backend.arena.key[0][live], after[1][live])
        assert torch.equal(backend.arena.value[0][live], after[2][live])


def test_imported_rotations_are_served(folder: Path, tmp_path: Path, layer: Any) -> None:
    """RotationZoo files: one rotation for all KV heads, clipped codes. The new token of a row of 100 reads every tier."""
    import_rotations(*good_pair(tmp_path)).save(tmp_path / "imported")
    backend, length = build(folder / "model", tmp_path / "imported", sink=16, recent=32), 100
    backend.arena.windows.open([(1, [], 0)])
    backend.arena.set_rows([1])
    k, v = torch.randn(2, length, 2, 16)
    q = torch.randn(1, 64)
    batch = step(backend, [length])
    own, transform = backend.serving.layers[0], backend.serving.layers[0].transform
    own.store(k, v, backend.pool.pages(0), backend.req_to_token[1, :length].long())
    positions = torch.arange(length)
    dense = (positions < 16) | (positions >= length - 32)
    cells = backend.arena.cells(torch.ones_like(positions), positions)[dense]
    for side, raw in ((backend.arena.key[0], k), (backend.arena.value[0], v)):
        side.fill_(float("nan")).flatten(0, 1)[cells] = raw[dense]
    backend.init_forward_metadata(batch)
    found = backend.forward_decode(q, k[-1:], v[-1:], layer, batch)
    coded = transform.requantize(k.double().transpose(0, 1), v.double().transpose(0, 1))
    seen = [torch.where(dense[:, None], raw.double().transpose(0, 1), code) for raw, code in zip((k, v), coded, strict=True)]
    keys, values = (side.repeat_interleave(2, 0) for side in seen)
    p = torch.softmax(q.double().view(4, 1, 16) @ keys.mT * layer.scaling, -1)
    assert torch.allclose(found.double(), (p @ values).reshape(1, 64), atol=1e-5)


def test_graphs_are_refused_where_kernels_run_in_plain_torch(backend: Any) -> None:
    with pytest.raises(InputError, match="CUDA graphs cannot be captured: layer 0: store runs in plain torch"):
        backend.init_cuda_graph_state(4, 4)


def test_the_pool_is_read_by_nothing_else(backend: Any) -> None:
    for name in ("get_key_buffer", "get_kv_buffer", "set_kv_buffer", "move_kv_cache", "get_cpu_copy"):
        with pytest.raises(NotImplementedError, match="only the attention backend oscar_int2"):
            getattr(backend.pool, name)(0)


def test_bytes_reported_are_bytes_allocated(backend: Any) -> None:
    key_bytes, value_bytes = backend.pool.get_kv_size_bytes()
    tokens = TOKENS * ROWS + PAGE
    assert key_bytes + value_bytes == tokens * backend.serving.token_bytes
    rows = sum(t.num_kv_heads * (codec.row_bytes) for t in transforms("balanced").values() for codec in t.codecs())
    assert backend.serving.token_bytes == rows
    tensors = [*backend.arena.key, *backend.arena.value, backend.arena.table]
    assert backend.arena.nbytes == sum(t.numel() * t.element_size() for t in tensors)
    assert backend.serving._arena_bytes(ROWS - 1) == backend.arena.nbytes


def test_requests_that_do_not_fit_are_refused_with_numbers(backend: Any) -> None:
    serving = backend.serving
    with pytest.raises(InputError, match=r"dense copies of 500 running requests take .* fit. Lower --max-running-requests"):
        serving.reserve(2_000_000, 500)
    left = serving.reserve(2_000_000, None)
    assert 0 < serving.num_requests < 500
    assert left + serving._arena_bytes(serving.num_requests) == 2_000_000
    assert serving._arena_bytes(serving.num_requests) <= 500_000 < serving._arena_bytes(serving.num_requests + 1)


def test_windows_of_the_artifact_are_the_windows(backend: Any) -> None:
    assert (backend.arena.shape.sink, backend.arena.shape.recent) == (SINK, RECENT)
