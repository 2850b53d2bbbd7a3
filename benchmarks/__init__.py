"""Benchmarks: each states its question, and answers in ratios measured in one run (D28)."""
