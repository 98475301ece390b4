"""Feeds random programs, configurations and checkpoint files to ds_lgamp. Each must work, or be refused by name."""
