"""Conformance: values that the official modules computed, replayed through an artifact (`python -m conformance`).

The tool is in the checkout and in no wheel, as the golden set in tests/data is. It has one module per golden file; the
name of a tensor gives its meaning. Dims come from the tensors and from the artifact's manifest, so a golden set of any
checkpoint can be replayed.
"""
