"""Checkpoints: the file, the folder that keeps them, resuming, and opening any trained model."""
