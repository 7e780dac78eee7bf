"""Triton kernels. Importing a module of this package needs triton; only the CUDA lane does."""
