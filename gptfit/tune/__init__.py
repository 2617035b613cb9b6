"""Tuning: what to try, one trial in its own process, the search, the ranking and what is kept of it."""
