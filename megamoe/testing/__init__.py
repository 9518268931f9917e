"""The oracle, comparison helpers and tolerances that tests, benchmarks and the launcher share."""
