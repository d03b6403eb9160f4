"""``python -m oscar_kv.cli``: the same as ``oscar``."""

from . import main

main()
