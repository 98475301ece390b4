"""The engine of plain scripts: transformers or nn.Sequential, ``engine(batch)``, ``backward`` and ``step``."""
