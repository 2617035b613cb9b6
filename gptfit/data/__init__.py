"""Sources to token files: documents, tokenizers, bins."""
