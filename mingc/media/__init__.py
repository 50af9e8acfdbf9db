"""Decodes media (images, videos, sounds) to features, in processes with limits; prompts hold the features."""
