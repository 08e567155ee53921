"""Evaluation with lm-evaluation-harness: the extra `eval`."""
