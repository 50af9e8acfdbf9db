"""Reads English and Chinese as a person does (`--speech-text natural`)."""
