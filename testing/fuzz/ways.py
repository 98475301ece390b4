"""Ways in which models of one's own differ from a plain one. Each fills slots of testing.fuzz.source."""

KEEP = 'keep = (tokens % 2).to(x.dtype).unsqueeze(-1)'

WAYS: dict[str, dict[str, str]] = {
    "a mask in attributes of blocks": {
        "block_init": "self.keep = None",
        "ahead": KEEP,
        "before": "block.keep = keep",
        "inside": "y = y * self.keep",
    },
    "a mask in a global": {
        "top": "SHARED = {}",
        "ahead": 'SHARED["keep"] = (tokens % 2).to(x.dtype).unsqueeze(-1)',
        "inside": 'y = y * SHARED["keep"]',
    },
}
