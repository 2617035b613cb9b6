"""Reads run logs; writes what a person looks at."""
