"""Models of transformers as layers."""
