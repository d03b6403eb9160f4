"""The kernels compile for GPUs that are not here: the interpreter, in which other tests run them, accepts more."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Builds a kernel from the types of its pointers (by the names of arguments; all others are int32) and its constants.
PRELUDE = """
import re, subprocess, tempfile, pathlib, torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from oscar_kv.kernels.triton import decode_kernels, prefill_kernels, store_kernels, trellis_kernels
from oscar_kv.kernels.triton.jit import load
from oscar_kv.kernels.triton.prefill import tuning

def build(kernel, types, constants, capability, warps=4, stages=3, spills=True, fusion=True):
    named = {name: kind for kind, names in types.items() for name in names.split()}
    order = kernel.arg_names
    signature = {n: "constexpr" if n in constants else named.get(n, "i32") for n in order}
    missing = [n for n in order if n.isupper() and n not in constants]
    assert not missing, missing
    ends = ("_stride", "_page", "_token", "_head")
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(order) if signature[n][0] == "*" or n.endswith(ends)}
    values = {(order.index(n),): v for n, v in constants.items()}
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fusion}
    done = triton.compile(ASTSource(kernel, signature, values, aligned), target=target, options=options)
    assert len(done.asm["cubin"]) > 1000
    if not spills:  # whole tiles must fit in registers, and several stages of loads in shared memory
        assert done.metadata.shared <= 99 * 1024, done.metadata.shared
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            pathlib.Path(file.name).write_bytes(done.asm["cubin"])
            tool = pathlib.Path(triton.knobs.nvidia.ptxas.path).with_name("cuobjdump")
            usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        assert re.search(r"STACK:0 ", usage), usage
    print("compiled")
    return done
"""
DECODE = """
types = {
    "*bf16": "query keys values", "*fp32": "slots sums accumulator stats", "*u8": "pages", "*fp16": "numbers lookup",
    "*i32": "table dense_table lengths", "i64": "page_stride", "fp32": "factor cap",
}
build(
    load(decode_kernels).decode, types,
    dict(HEADS=2, G=5, D=80, DV=64, DW=128, DVW=64, M=16, P=64, PD=16, KB=20, KW=32, VB=16, VW=16, KEY_EXTRA=True,
         VALUE_EXTRA=not TRELLIS, TRELLIS=TRELLIS, CAP=TRELLIS, N=64, ND=64, DOT=tl.float16, RAW=tl.bfloat16, ASM=ASM),
    CAPABILITY,
)
"""
MERGE = """
build(
    load(decode_kernels).merge,
    {"*fp32": "accumulator stats value_slots value_sums sinks lse", "*bf16": "out"},
    dict(HEADS=2, G=5, DV=80, VB=20, SW=128, M=16, TW=16, C=32, SINKS=True), 90,
)
"""
STORE = """
build(
    load(store_kernels).encode_store,
    {"*bf16": "key value dense_key dense_value", "*u8": "pages", "*fp16": "numbers", "*i32": "key_order value_order",
     "*i64": "slots dense_slots", "i64": "page_stride",
     "*fp32": "key_in key_mean key_vectors key_usual value_in value_mean value_vectors value_usual transformed"},
    dict(D=20, W=32, KEY_CODEC="digits", KEY_SEARCH=True, KEY_CLIP=-1, KB=5, KN=2, DV=20, WV=32, VALUE_CODEC=VALUE,
         VALUE_SEARCH=True, VALUE_CLIP=18, VB=5, VN=2, P=16, PD=16, DENSE=True, T=16, C=16, PRECISION="ieee"), 90,
)
"""
TRELLIS = """
done = build(
    load(trellis_kernels).encode_trellis,
    {"*fp32": "rows tables", "*i32": "pages", "*fp16": "numbers", "*i64": "slots", "i64": "page_stride"},
    dict(HEADS=8, D=80, W=128, BW=8, SEARCH=True, CODES=64 * 24, NUMBERS=64 * 44, P=64, T=1), 90, 1, spills=False, fusion=False,
)
assert "fma.rn.f32" not in done.asm["ptx"]  # a fused step would round otherwise than the codec
"""
PREFILL = """
W = max(64, 1 << (D - 1).bit_length())
M, N, ND = tuning(W, torch.bfloat16, CAPABILITY == 90)
WARPS = 4 if W * M <= 8192 else 8
"""
TERMS = """
build(
    load(prefill_kernels).terms,
    {"*bf16": "query", "*fp32": "query_slots query_sums query_noise numbers", "*fp16": "slots", "fp32": "factor scaling limit"},
    dict(G=4, D=D, DW=W, M=32, NOISE=True, DOT=tl.float16, C=32), CAPABILITY, 8 if W > 128 else 4, 2, spills=False,
)
"""
HISTORY = """
build(
    load(prefill_kernels).history,
    {"*fp16": "slots numbers lookup", "*fp32": "terms_at accumulator stats", "*u8": "pages", "i64": "page_stride",
     "*i32": "words table lengths starts", "fp32": "cap"},
    dict(G=4, D=D, DW=W, DV=D, DVW=W, M=M, P=64, KB=D // 4, VB=D // 4, KEY_EXTRA=True, KEY_CENTRE=not TRELLIS,
         VALUE_EXTRA=not TRELLIS, VALUE_CENTRE=False, TRELLIS=TRELLIS, CAP=TRELLIS, N=N, BW=16, DOT=tl.float16, ASM=True),
    CAPABILITY, WARPS, 3, spills=False,
)
"""
OWN = """
build(
    load(prefill_kernels).own,
    {"*bf16": "query key value keys values out", "*fp32": "accumulator stats value_slots value_sums sinks lse",
     "*i32": "table lengths starts", "fp32": "factor cap"},
    dict(G=4, D=D, DW=W, DV=D, DVW=W, M=M, P=16, CAP=D == 256, SINKS=True, VALUE_CENTRE=False, N=ND, BW=16, C=32,
         RAW=tl.bfloat16, PRECISION="tf32"),
    CAPABILITY, WARPS, 2, spills=False,
)
"""


def prefill(code: str, dim: int, capability: int, trellis: bool = False) -> str:
    return f"D, CAPABILITY, TRELLIS = {dim}, {capability}, {trellis}" + PREFILL + code


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("TRELLIS, ASM, CAPABILITY = False, True, 90" + DECODE, id="decode-hopper"),
        pytest.param("TRELLIS, ASM, CAPABILITY = True, False, 80" + DECODE, id="decode-trellis-ampere"),
        pytest.param(MERGE, id="merge"),
        pytest.param('VALUE = "int2"' + STORE, id="store"),
        pytest.param('VALUE = "trellis"' + STORE, id="store-trellis"),
        pytest.param(TRELLIS, id="trellis"),
        pytest.param(prefill(TERMS, 128, 90), id="prefill-terms-hopper"),
        pytest.param(prefill(HISTORY, 128, 90), id="prefill-history-hopper"),
        pytest.param(prefill(HISTORY, 128, 90, True), id="prefill-history-trellis-hopper"),
        pytest.param(prefill(HISTORY, 80, 80, True), id="prefill-history-trellis-ampere"),
        pytest.param(prefill(HISTORY, 256, 90), id="prefill-history-wide-hopper"),
        pytest.param(prefill(OWN, 128, 90), id="prefill-own-hopper"),
        pytest.param(prefill(OWN, 128, 80), id="prefill-own-ampere"),
        pytest.param(prefill(OWN, 256, 90), id="prefill-own-wide-hopper"),
    ],
)
def test_it_compiles_without_a_gpu(code: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PRELUDE + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.stdout.strip().endswith("compiled"), done.stderr[-3000:]
