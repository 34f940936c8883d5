"""The outer server as a learner, an evaluator or a person reaches it."""

from services.client.outer import GrpcLink
from services.client.status import fetch_status, watch_status

__all__ = ["GrpcLink", "fetch_status", "watch_status"]
