"""Feeds random programs, configurations, checkpoint files and own models to ds_lgamp. Each must work, or be refused by
name."""
