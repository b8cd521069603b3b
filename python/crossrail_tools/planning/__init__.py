"""Predictions for expert parallelism on a cluster: bytes, times and memory, from closed forms.

Formulas, their sources, and how far they are from measurements: docs/plan.md. Nothing here measures or needs the
native module.
"""
