"""gptfit: fit a GPT to your GPU."""

__version__ = "0.1.0"
