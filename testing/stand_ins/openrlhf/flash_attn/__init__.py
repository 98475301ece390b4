"""Stands in for flash-attn, which needs CUDA. OpenRLHF imports these names, and calls them for packed samples alone."""

__version__ = "0"
