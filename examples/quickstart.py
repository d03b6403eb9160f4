"""From a model to text with a 2-bit cache: load, calibrate, generate, measure.

python examples/quickstart.py [MODEL]     (default: the demo's SmolLM2-135M-Instruct)
"""

import sys

from oscar_kv import Artifact, OscarCache, OscarConfig, calibrate
from oscar_kv.demo_model import fetch_demo_model
from oscar_kv.loading import load_model, load_tokenizer

name = sys.argv[1] if len(sys.argv) > 1 else str(fetch_demo_model(print))
model, tokenizer = load_model(name), load_tokenizer(name)

# Calibrate. The default budget is 32,768 tokens in sequences of 4,096; this is the quick version.
artifact = calibrate(model, tokenizer, config=OscarConfig(tokens=8192, seq_len=1024, selection_windows=1))
artifact.save("quickstart.oscar")
print("fidelity on held-out text:", artifact.fidelity)

# Generate, with a prompt long enough to leave the dense windows.
prompt = "A list of facts about prime numbers.\n" + "\n".join(f"{n} is a number." for n in range(200))
inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
cache = OscarCache(Artifact.load("quickstart.oscar"), model)
output = model.generate(**inputs, past_key_values=cache, max_new_tokens=32, do_sample=False)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))

# Measure: allocated bytes of both caches at this length.
dense = OscarCache.dense(model)
model.generate(**inputs, past_key_values=dense, max_new_tokens=32, do_sample=False)
print(f"2-bit cache {cache.nbytes:,} bytes ({cache.bits_per_element():.2f} bits per element), dense {dense.nbytes:,} bytes")
