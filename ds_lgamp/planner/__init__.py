"""Predicts how fast a configuration trains on a cluster, and finds the fastest. Pure Python; needs neither torch nor a
GPU. The only place that knows prices and peak rates."""
