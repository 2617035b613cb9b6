"""What a config will do on a GPU: arithmetic only, no torch."""
