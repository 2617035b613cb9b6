"""A trained model for other programs: Hugging Face, GGUF, nanoGPT."""
