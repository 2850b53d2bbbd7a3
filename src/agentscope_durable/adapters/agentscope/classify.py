"""Whether trying an invocation again may help, as far as AgentScope's errors say (RC-09).

Rule: a provider's status decides, whatever library brought it: 408, 409, 425, 429 and 5xx may pass, any other 4xx is
the request's own fault. A connection that failed may pass. What is not known here is left to the runtime (RC-06).
"""

from __future__ import annotations

from typing import Final

from agentscope_durable.contracts.errors import AgentFactoryError, DurableError, leaves

__all__ = ["classify_error"]

RETRYABLE_STATUSES: Final = frozenset({408, 409, 425, 429})
CHAIN_MAX: Final = 8
"""Causes of an error that are looked at."""

_NETWORK: Final = frozenset(
    {
        # openai, anthropic, httpx, httpcore, aiohttp, google, botocore: by name, none of them is imported here.
        "APIConnectionError",
        "APITimeoutError",
        "ConnectError",
        "ConnectTimeout",
        "ReadError",
        "ReadTimeout",
        "WriteError",
        "WriteTimeout",
        "PoolTimeout",
        "NetworkError",
        "RemoteProtocolError",
        "ClientConnectionError",
        "ClientConnectorError",
        "ServerDisconnectedError",
        "ServerTimeoutError",
        "ServiceUnavailable",
        "DeadlineExceeded",
        "EndpointConnectionError",
        "IncompleteRead",
    }
)


def classify_error(error: BaseException) -> bool | None:
    """True: trying again may help; False: it cannot; None: not known here. Of a group, all must be retryable."""
    answers = [_classify(leaf) for leaf in leaves(error)]
    if not answers:
        return None
    if False in answers:
        return False
    return None if None in answers else True


def _classify(error: BaseException) -> bool | None:
    if isinstance(error, AgentFactoryError):
        # A factory that could not reach something may do so later; one that is wrong stays wrong.
        return isinstance(error.__cause__, OSError)
    if isinstance(error, DurableError):
        # An error of our own has a status for HTTP, which says nothing about a provider.
        return None
    cause: BaseException | None = error
    for _ in range(CHAIN_MAX):
        if cause is None:
            break
        status = _status(cause)
        if status is not None:
            return status in RETRYABLE_STATUSES or status >= 500
        if type(cause).__name__ in _NETWORK or isinstance(cause, ConnectionError | TimeoutError):
            return True
        cause = cause.__cause__
    if any(kind.__name__ == "DeveloperOrientedException" for kind in type(error).__mro__):
        return False
    return None


def _status(error: BaseException) -> int | None:
    """An HTTP status, where provider libraries keep it."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status", "http_status", "code"):
            status = getattr(holder, name, None)
            if isinstance(status, int) and not isinstance(status, bool) and 400 <= status <= 599:
                return status
    return None
