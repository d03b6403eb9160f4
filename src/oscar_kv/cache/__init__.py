"""The cache: one tier rule, a packed page store with its dense mirror, and a dense store behind the same interface."""
