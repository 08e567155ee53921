"""Evaluation with lm-evaluation-harness. It requires the extra `eval`."""
