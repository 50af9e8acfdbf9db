"""Clients that load any OpenAI-compatible server, and what they saw."""
