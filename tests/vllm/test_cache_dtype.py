"""``--kv-cache-dtype oscar_int2``, where vLLM lets plugins name such a type."""

from __future__ import annotations

import pytest
from engines import ask, assert_exact, assert_no_leak, engine, prompt

from oscar_kv.integrations.vllm import compat


def test_the_type_is_accepted_beside_the_backend_and_changes_nothing(tiny):
    if not compat.cache_dtypes_can_be_registered():
        pytest.skip("reason=this vLLM lets no plugin name a cache dtype (0.33 does)")
    with engine(tiny, kv_cache_dtype="oscar_int2") as llm:
        (answer,) = ask(llm, [prompt(500)])
        assert_exact(tiny, answer, [500])
        assert_no_leak(llm)
