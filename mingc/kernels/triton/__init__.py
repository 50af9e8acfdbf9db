"""Triton kernels, one operation a file. Export traces them into graphs; engines contain them compiled."""
