"""Models as layers of a pipeline: their own forward, split at their blocks."""
