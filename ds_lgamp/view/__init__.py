"""Shows steps: draws simulated programs, and reads and draws recordings of simulated and real ones. Pure Python."""
