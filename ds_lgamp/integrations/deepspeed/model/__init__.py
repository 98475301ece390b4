"""Puts the layers of a PipelineModule into chunks, each on its pipeline rank."""
