"""Training: setup, loop, engine, optimizers, batches, evaluation on the way, faults and sinks."""
