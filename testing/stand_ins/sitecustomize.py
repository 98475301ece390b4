"""Python runs this at its start where this folder is on PYTHONPATH: in every process of public code under test."""

from testing.in_host import prepare

prepare()
