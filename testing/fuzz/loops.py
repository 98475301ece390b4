"""Ways in which loops differ from a plain one, with what models need for them. Each fills slots of
testing.fuzz.source."""

LOOPS: dict[str, dict[str, str]] = {
    "a temperature by micro-batch": {
        "model_init": "self.temperature = 1.0",
        "end": "+\nloss = loss * self.temperature",
        "before_call": "model.temperature = 1.0 + number",
    },
}
