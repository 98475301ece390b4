"""Runs at the start of every Python process with this folder on PYTHONPATH, which is every process of public code under
test."""

from testing.in_host import prepare

prepare()
