"""Predictions for expert parallelism on a cluster: bytes, times and memory, from closed forms.

Formulas, their sources, and how far they are from measurements: docs/plan.md. Nothing here measures or needs the
native module.
"""

from .calibration import Compared, Files, Measured, calibrated, compared, read
from .cost import Memory, OperationPlan, Planned, plan, turn
from .presets import CLUSTERS, MODELS, PUBLISHED, Published
from .reading import cluster_of, contents, load, model_of
from .routing import Routing
from .shapes import PHASES, SENDS, Cluster, Model, Network, Phase, PlanError, Send, plain
from .tables import assumptions, band, check_tables, plan_tables, published_tables

__all__ = [
    "CLUSTERS",
    "MODELS",
    "PHASES",
    "PUBLISHED",
    "SENDS",
    "Cluster",
    "Compared",
    "Files",
    "Measured",
    "Memory",
    "Model",
    "Network",
    "OperationPlan",
    "Phase",
    "PlanError",
    "Planned",
    "Published",
    "Routing",
    "Send",
    "assumptions",
    "band",
    "calibrated",
    "check_tables",
    "cluster_of",
    "compared",
    "contents",
    "load",
    "model_of",
    "plain",
    "plan",
    "plan_tables",
    "published_tables",
    "read",
    "turn",
]
