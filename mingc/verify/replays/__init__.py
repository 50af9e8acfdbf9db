"""Replays of recorded reference values through an artifact's engines and preprocessing: one module per golden file.

The formats are those of the golden set in tests/data: the name of a tensor gives its meaning. Dims come from the
tensors and from the artifact's manifest, so goldens of any checkpoint can be replayed.
"""
