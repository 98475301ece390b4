"""The engine of plain scripts: any model but a PipelineModule, ``engine(batch)``, ``backward`` and ``step``."""
