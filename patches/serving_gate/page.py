"""The web page: one file that holds no data, so that it may be read by everybody; what it shows it asks for."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["Page", "page"]

FILE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Page:
    """The page and the policy under which a browser may run it: its own script and style, its own server, no more."""

    html: bytes
    policy: str

    @property
    def headers(self) -> dict[str, str]:
        """The headers that it is sent with."""
        return {
            "content-security-policy": self.policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-store",
        }


@cache
def page() -> Page:
    """The page, read once."""
    html = FILE.read_bytes()
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; script-src {_hash(html, 'script')}; "
        f"style-src {_hash(html, 'style')}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(html, policy)


def _hash(html: bytes, element: str) -> str:
    """The hash by which a policy names the page's one inline ``element``."""
    (content,) = re.findall(rb"<%b>(.*?)</%b>" % (element.encode(), element.encode()), html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"
