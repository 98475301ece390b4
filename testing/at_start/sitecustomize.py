"""Runs at the start of every Python process with this folder on PYTHONPATH, as all processes of public code under test
have."""

from testing.in_host import prepare

prepare()
