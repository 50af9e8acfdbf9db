"""Served goldens: whole requests, recorded at export from eager modules and replayed through the serving code."""
