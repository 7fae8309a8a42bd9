"""Benchmarks. Each is a module run with `python -m benchmarks.<name>` and writes `results/<name>-<device>.json`."""
