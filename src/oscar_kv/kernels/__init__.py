"""Attention over packed history. ``reference`` is readable torch and the contract; ``dispatch`` picks what runs."""
