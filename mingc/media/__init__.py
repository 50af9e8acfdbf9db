"""Host side of model inputs: images, video, audio, chat prompts and speech prompts."""
