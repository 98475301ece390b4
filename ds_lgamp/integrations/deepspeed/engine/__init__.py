"""DeepSpeed's pipeline engine, which runs programs."""
