"""The queries of the alert rules and of the dashboard, as they stand in ``deploy/monitoring``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

__all__ = ["FOLDER", "alerts", "panels", "queries"]

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"


def alerts() -> list[dict[str, Any]]:
    """Every alert rule."""
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    """Every panel of the dashboard that shows data."""
    dashboard = json.loads((FOLDER / "grafana" / "dashboards" / "vllm-splint.json").read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries(interval: str = "1m") -> dict[str, str]:
    """Panel and query letter to PromQL, with Grafana's variables filled in."""
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        .replace("$__rate_interval", interval)
        .replace("$instance", ".*")
        for panel in panels()
        for target in panel["targets"]
    }
