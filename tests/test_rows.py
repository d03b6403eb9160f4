"""What all codecs share: rows of another form are refused, chunks change no byte, temporaries are bounded, tables stay put."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_digits import random_layout
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from oscar_kv.method import hadamard as orders
from oscar_kv.method.codecs import Codec, CodecSpec, make_codec, rows, trellis

NAMES = ("int2", "digits", "digits1", "trellis")


def codec_of(name: str, dim: int, heads: int = 2) -> Codec:
    layout = random_layout(heads, dim, name == "digits") if name.startswith("digits") else None
    return make_codec(CodecSpec(name, group_size=-1), dim, layout)


@pytest.mark.parametrize("extra", [-99, -1, 1])
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_another_length_are_refused_before_they_are_read(
    name: str, extra: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = codec_of(name, 24)
    encoded = codec.encode(torch.randn(1, 2, 3, 24))
    wrong = encoded.repeat(1, 1, 1, 2)[..., : max(0, codec.row_bytes + extra)]

    def read(*_: Any) -> None:
        raise AssertionError("the symbols were read")

    monkeypatch.setattr(rows, "unpack2", read)
    for use in (codec.decode, codec.saturated):
        with pytest.raises(ValueError, match=rf"rows of {codec.row_bytes} bytes expected, got shape \(1, 2, 3, "):
            use(wrong)


@pytest.mark.parametrize("name", ["digits", "digits1"])
def test_rows_of_other_heads_are_refused(name: str) -> None:
    codec = codec_of(name, 24, heads=3)
    encoded = codec.encode(torch.randn(1, 3, 4, 24))
    for wrong in (encoded[:, :1], encoded[:, :2], encoded[0, 0], encoded[0, 0, 0]):
        with pytest.raises(ValueError, match=r"codec for 3 heads got rows of shape .*, not \[\.\.\., 3, T, bytes\]"):
            codec.decode(wrong)
    assert torch.equal(codec.decode(encoded[0]), codec.decode(encoded)[0])


@pytest.mark.parametrize("name", NAMES)
def test_the_size_of_chunks_changes_no_byte(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = codec_of(name, 24)
    x = torch.randn(3, 2, 37, 24)
    whole = codec.encode(x)
    for size in (1, 24 * 6 * 5):
        monkeypatch.setattr(rows, "CHUNK", size)
        monkeypatch.setattr(trellis, "_ROWS", max(1, size // 24))
        assert torch.equal(codec.encode(x), whole)


class LiveBytes(TorchDispatchMode):
    """The most bytes of storages made within this context that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {key: held for key, held in self.live.items() if not held[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.live.values()))
        return result


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["int2", "digits", "trellis"])
def test_a_chunk_on_a_device_needs_a_gibibyte_at_most(name: str, dim: int) -> None:
    """Measured on a smaller chunk: temporaries grow with the elements."""
    tokens = 256
    codec = codec_of(name, dim)
    x = torch.randn(1, 2, tokens, dim)
    codec.encode(x[:, :, :1])  # tables
    with LiveBytes() as seen:
        codec.encode(x)
    elements = rows.CHUNK_DEVICE if name != "trellis" else min(rows.CHUNK_DEVICE, trellis._ROWS_DEVICE * dim)
    assert 4 * x.numel() < seen.most
    assert seen.most / x.numel() * elements < 2**30


def test_tables_do_not_keep_the_defaults_of_their_first_use() -> None:
    trellis._table.cache_clear()
    orders._hadamard.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode():
            first = (trellis._table(), *(orders.hadamard(dim) for dim in (8, 12, 28, 35)))
    finally:
        torch.set_default_dtype(torch.float32)
    again = (trellis._table(), *(orders.hadamard(dim) for dim in (8, 12, 28, 35)))
    for a, b in zip(first, again, strict=True):
        assert a.device.type == b.device.type == "cpu"
        assert torch.equal(a, b)
    assert [t.dtype for t in again] == [torch.float32] + [torch.float64] * 4
    assert not again[0].is_inference()
    for matrix in again[1:]:
        torch.testing.assert_close(matrix @ matrix.mT, torch.eye(len(matrix)).double())


def test_the_trellis_table_is_copied_to_a_device_once() -> None:
    meta = torch.device("meta")
    assert trellis._table(meta) is trellis._table(meta)
    assert trellis._table(meta).device == meta
