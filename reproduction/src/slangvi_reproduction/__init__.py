"""The paper's experiments, benchmarks against peers, and the data sets of both; not part of the library."""
