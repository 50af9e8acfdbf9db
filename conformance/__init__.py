"""Conformance: values that the official modules computed, replayed through an artifact (`python -m conformance`).

A tool of the checkout, in no wheel: the golden set in tests/data exists only here. One module per golden file; the name
of a tensor gives its meaning. Dims come from the tensors and from the artifact's manifest, so a golden set of any
checkpoint can be replayed.
"""
