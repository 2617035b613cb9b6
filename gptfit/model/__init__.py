"""The torch modules."""
