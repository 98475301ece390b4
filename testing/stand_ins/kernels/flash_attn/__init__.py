"""Stands in for flash-attn, which needs CUDA. OpenRLHF and transpeeder import these names. OpenRLHF calls them for
packed samples alone, transpeeder if a flag asks for it."""

__version__ = "0"
