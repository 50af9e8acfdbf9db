"""Numerical comparison with a float32 reference, shared by export checks and verification."""
