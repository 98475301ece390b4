"""The folder of a checkpoint."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or loaded; the message names the file and the fix."""
