"""Benchmark suites: which models, with which inputs, how they are measured and what is made of the figures."""
