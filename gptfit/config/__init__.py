"""A run as flat keys: what they are, reading, checking and writing them."""
