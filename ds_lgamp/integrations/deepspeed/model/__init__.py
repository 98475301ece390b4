"""PipelineModule: its layers in chunks, each on its pipeline rank."""
