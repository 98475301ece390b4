"""Models of Hugging Face's transformers as layers of a pipeline."""
