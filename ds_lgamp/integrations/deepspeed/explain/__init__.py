"""``ds_lgamp run --explain`` and ``--measure``."""
