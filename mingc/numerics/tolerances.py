"""Relative errors that engine outputs may have."""

from __future__ import annotations

from typing import Final

GRAPH_TOLERANCES: Final = {"float32": 1e-4, "bfloat16": 3e-2}
"""By compute dtype: error of one graph against its float32 reference, relative to the reference's largest magnitude.

Chains of graphs accumulate error; `mingc.verify` has a wider bound for comparing whole models with recorded values.
"""

REFERENCE_TOLERANCES: Final = {"float32": 1e-4, "bfloat16": 1e-1}
"""By compute dtype: error of chains of graphs, such as whole models, against recorded float32 values, relative to the
largest magnitude of the reference.
"""
