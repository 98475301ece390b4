"""Optimizers whose update of an element depends on its whole tensor: LAMB and Muon, on shards."""
