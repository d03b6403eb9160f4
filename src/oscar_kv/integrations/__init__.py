"""Adapters to engines. They adapt and compute nothing of their own."""
