"""The device: cpu, cuda or mps, its memory, compiler and driver, and several processes on several of them."""
