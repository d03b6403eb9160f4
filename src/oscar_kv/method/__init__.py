"""The mathematics: transforms, statistics and codecs. Knows tensors only; no model, no cache, no engine."""
