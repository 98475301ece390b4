"""Runs a program: an executor with one method per action, on chunks, links and the ZeRO partition."""
