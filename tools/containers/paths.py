#!/usr/bin/env python3
"""Stands for an image's interpreter where cyclonedx-py asks for its path: folders of the image at /image."""

import json
from pathlib import Path

PATTERNS = ("usr/local/lib/python3*/*-packages", "usr/lib/python3*/*-packages", "opt/*/lib/python3*/site-packages")

print(json.dumps([str(path) for pattern in PATTERNS for path in sorted(Path("/image").glob(pattern))]))
