"""Run logs: our run.jsonl, and the stdout of nanoGPT and nanochat read as the same thing."""
