"""Is this machine ready to train?"""
