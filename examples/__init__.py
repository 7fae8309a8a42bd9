"""Runnable recipes."""
