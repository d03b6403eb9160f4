"""The kernels compile for GPUs that are not here: the interpreter, in which other tests run them, accepts more."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Builds a kernel from the types of its pointers (by the names of arguments; all others are int32) and its constants.
PRELUDE = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from oscar_kv.kernels.triton import decode_kernels, store_kernels
from oscar_kv.kernels.triton.jit import load

def build(kernel, types, constants, capability):
    named = {name: kind for kind, names in types.items() for name in names.split()}
    order = kernel.arg_names
    signature = {n: "constexpr" if n in constants else named.get(n, "i32") for n in order}
    missing = [n for n in order if n.isupper() and n not in constants]
    assert not missing, missing
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(order) if signature[n][0] == "*" or n.endswith("_stride")}
    values = {(order.index(n),): v for n, v in constants.items()}
    target = GPUTarget("cuda", capability, 32)
    done = triton.compile(ASTSource(kernel, signature, values, aligned), target=target, options={"num_warps": 4})
    assert len(done.asm["cubin"]) > 1000
    print("compiled")
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
     "*fp32": "key_in key_mean key_vectors key_usual value_in value_mean value_vectors value_usual"},
    dict(D=20, W=32, KEY_DIGITS=True, KEY_SEARCH=True, KB=5, KN=2, DV=20, WV=32, VALUE_DIGITS=False, VALUE_SEARCH=True, VB=5,
         VN=2, P=16, PD=16, DENSE=True, T=16, C=16, PRECISION="ieee"), 90,
)
"""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("TRELLIS, ASM, CAPABILITY = False, True, 90" + DECODE, id="decode-hopper"),
        pytest.param("TRELLIS, ASM, CAPABILITY = True, False, 80" + DECODE, id="decode-trellis-ampere"),
        pytest.param(MERGE, id="merge"),
        pytest.param(STORE, id="store"),
    ],
)
def test_it_compiles_without_a_gpu(code: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PRELUDE + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.stdout.strip().endswith("compiled"), done.stderr[-3000:]
