"""Names that nobody calls here."""

flash_attn_varlen_qkvpacked_func = None
