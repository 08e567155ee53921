"""Evaluation with lm-evaluation-harness. It requires the `eval` extra."""
