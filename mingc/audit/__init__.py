"""Judges by a client how servers sound and what they say: two groups of sounds, or a server against known answers."""
