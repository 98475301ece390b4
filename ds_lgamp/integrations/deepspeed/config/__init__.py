"""What a ``ds_lgamp`` block makes of the rest of ds_config.json."""
