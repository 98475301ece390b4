"""Steps to look at: drawings of simulated programs, and recordings of simulated and real ones. Pure Python."""
