"""Triton kernels of the paged operations; triton is imported by the first call, never by an import of these files."""
