"""Runs side by side as data and sentences: what changed, who is ahead, and why."""
