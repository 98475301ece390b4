"""Feeds random programs, configurations, checkpoint files and models to ds_lgamp. Each must work, or be refused by name."""
