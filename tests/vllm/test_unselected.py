"""The plugin is installed and another backend serves: nothing is different from a vLLM without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from engines import ask, engine, layers, prompt

ALONE = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=4096, seed=0)
sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
output = llm.generate([{"prompt_token_ids": json.loads(sys.argv[2])}], sampling, use_tqdm=False)
ours = [module for module in sys.modules if module.startswith("oscar_kv")]
print(json.dumps({"tokens": list(output[0].outputs[0].token_ids), "ours": ours}))
"""


@pytest.mark.parametrize(
    "settings", [None, {"oscar_kv": {"artifact": "ignored"}}], ids=["bare", "settings without the backend"]
)
def test_tokens_and_caches_are_those_of_a_vllm_without_the_plugin(tiny, settings):
    ids = prompt(500, seed=5)
    with engine(tiny, poisoned=False, attention_config={}, additional_config=settings or {}) as llm:
        (answer,) = ask(llm, [ids])
        assert {type(layer).__module__.split(".")[0] for layer in layers(llm).values()} == {"vllm"}
        assert all("oscar_kv" not in type(layer.impl).__module__ for layer in layers(llm).values())
    if settings is None:
        environment = {**os.environ, "VLLM_PLUGINS": "none"}
        done = subprocess.run(
            [sys.executable, "-c", ALONE, str(tiny.folder), json.dumps(ids)], env=environment, capture_output=True, text=True,
            check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        alone = json.loads(done.stdout.strip().splitlines()[-1])
        assert alone == {"tokens": answer.tokens, "ours": []}
