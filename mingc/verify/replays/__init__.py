"""Replays recorded reference values through an artifact's engines and preprocessing, one file of goldens a module.

The formats are those of the golden set in tests/data: a tensor's meaning follows from its name. Dims are read from the
tensors and from the artifact's manifest, so any checkpoint's goldens can be replayed.
"""
