"""Evaluation with lm-evaluation-harness; requires the extra `eval`."""
