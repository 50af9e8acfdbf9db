"""Replay of thinker.safetensors: prompts, decode batches, expert routing and greedy continuations."""
