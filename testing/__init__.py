"""What tests, benchmarks and the run of public code share; no part of the package that is installed."""
