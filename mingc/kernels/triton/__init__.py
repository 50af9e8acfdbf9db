"""Triton kernels, one op a file. Imported only where a CUDA graph is traced: engines carry them compiled."""
