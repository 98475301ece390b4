"""The ZeRO partition policy: a chunk's parameters in one flat unit, sharded over the data-parallel group."""
