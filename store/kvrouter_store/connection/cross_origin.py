"""Requests that a page in a browser sends to this port: pages of other sites change nothing.

A browser sends a simple POST of any page to any port that its host reaches, without asking first
(Fetch standard, section 3.2.2). It names the page in `Sec-Fetch-Site` and `Origin`, which no page
can change. The rule is that of Go's http.CrossOriginProtection, plus one against DNS rebinding.
"""

from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})  # RFC 9110, section 9.2.1
OWN_SITES = frozenset({"same-origin", "none"})  # none: the user did it, and no page


def cross_origin_refusal(method: str, headers: Mapping[str, str]) -> str:
    """Why to answer the request with 403; "" to serve it. Names of `headers` are in lower case."""
    site, origin = headers.get("sec-fetch-site", "").lower(), headers.get("origin", "")
    if method in SAFE_METHODS or not (site or origin):  # programs send neither header
        return ""
    host = headers.get("host", "").lower()
    own = site in OWN_SITES if site else _netloc(origin) == host
    if not own:
        return "a page of another origin may not send this request; send it without a browser"
    if not _names_this_host(host):
        return (
            "a page may send this request only to an IP address or localhost: any site can let a "
            "name of its own lead here; send it without a browser"
        )
    return ""


def _netloc(url: str) -> str:
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return ""


def _names_this_host(host: str) -> bool:
    """Whether `Host` needs no name server, which another site could control."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name == "localhost" or name.endswith(".localhost"):  # RFC 6761, section 6.3
            return True
        ip_address(name)
    except ValueError:
        return False
    return True
