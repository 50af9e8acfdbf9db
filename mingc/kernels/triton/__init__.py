"""Triton kernels, one operation per file. Export traces them into graphs; engines contain them compiled."""
