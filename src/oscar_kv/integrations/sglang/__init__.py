"""SGLang with a 2-bit KV cache: ``--kv-cache-dtype oscar_int2``. See docs/sglang.md.

Nothing here is imported before SGLang loads its plugins. Only :mod:`.pool` and :mod:`.backend` import it at their top.
"""
