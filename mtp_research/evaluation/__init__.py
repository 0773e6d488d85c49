"""Evaluation: prompts, acceptance statistics with intervals, and the report."""
