"""Which AgentScope is installed, and whose state it may continue (D21).

Rule 1: a release counts as tested only when the whole crash matrix has run on it.
Rule 2: an untested release may begin new Turns, with one warning. A Turn in flight waits for a release that is tested
with what wrote it, unless the application says that it accepts the risk.
"""

from __future__ import annotations

import importlib.metadata
import logging
from typing import Final

from agentscope_durable.contracts.errors import MissingExtra

__all__ = ["EXTRA", "TESTED", "installed_version", "may_continue", "require", "warn_if_untested"]

EXTRA: Final = "agentscope"
TESTED: Final = frozenset({"2.0.8", "2.0.9", "2.0.10", "2.0.11"})
"""Releases on which the crash matrix has passed."""

log = logging.getLogger("agentscope_durable.adapters")

_warned: set[str] = set()


def installed_version() -> str:
    """
    Raises:
        MissingExtra: AgentScope is not installed.
    """
    try:
        return importlib.metadata.version("agentscope")
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingExtra("running AgentScope agents", EXTRA) from error


def require() -> str:
    """Make sure that AgentScope can be imported; returns its version.

    Raises:
        MissingExtra: it cannot.
    """
    version = installed_version()
    try:
        import agentscope.agent  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise MissingExtra("running AgentScope agents", EXTRA) from error
    return version


def may_continue(writer: str, *, installed: str, accept_untested: bool) -> bool:
    """Whether state that `writer` wrote may be continued by the installed release."""
    if writer in ("", installed) or accept_untested:
        return True
    return writer in TESTED and installed in TESTED


def warn_if_untested(version: str) -> None:
    if version in TESTED or version in _warned:
        return
    _warned.add(version)
    log.warning(
        "AgentScope %s was not tested with this release (tested: %s): new Turns run on it, Turns in flight of another "
        "release wait. Pass accept_untested_agentscope=True to continue them as well",
        version,
        ", ".join(sorted(TESTED, key=lambda text: [int(part) for part in text.split(".")])),
    )
