"""Offline generation by vLLM with a 2-bit cache: several prompts that share a beginning.

python examples/vllm_offline.py MODEL ARTIFACT      (ARTIFACT: what `oscar calibrate MODEL -o ARTIFACT` wrote)

Needs `pip install 'oscar-kv[vllm]'`. MODEL is a hub id or a folder.
"""

import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":  # vLLM starts processes of its own, which read this file again
    model, artifact = sys.argv[1:3]
    llm = LLM(
        model,
        attention_config={"backend": "CUSTOM"},
        additional_config={"oscar_kv": {"artifact": artifact}},
        max_model_len=4096,
    )
    shared = "A list of facts about numbers.\n" + "\n".join(f"{n} is a number." for n in range(200)) + "\n"
    prompts = [shared + question for question in ("The largest of them is", "The smallest of them is")]
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=32)):
        print(output.num_cached_tokens or 0, "tokens of the prompt came from the cache;", repr(output.outputs[0].text))
