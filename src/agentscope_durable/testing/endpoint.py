"""The model that the environment names: for examples that run without a key, and with one when there is one.

DURABLE_MODEL_BASE_URL    an OpenAI-compatible endpoint, such as http://localhost:8000/v1
DURABLE_MODEL             the name of the model there
DURABLE_MODEL_API_KEY     its key, if it wants one
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from agentscope_durable.contracts.errors import Misuse

__all__ = ["endpoint_model"]

ADDRESS, NAME, KEY = "DURABLE_MODEL_BASE_URL", "DURABLE_MODEL", "DURABLE_MODEL_API_KEY"


def endpoint_model(
    environ: Mapping[str, str] = os.environ, *, http_client: Callable[[], Any] | None = None
) -> Any | None:
    """An AgentScope model for the endpoint that the environment names; None when it names none.

    Args:
        environ: where the names are looked up.
        http_client: makes the `httpx.AsyncClient` to use; called only when there is an endpoint.

    Raises:
        Misuse: there is an address and no name of a model.
        ImportError: AgentScope is not installed.
    """
    address = environ.get(ADDRESS)
    if not address:
        return None
    if not environ.get(NAME):
        raise Misuse(f"{ADDRESS} is set and {NAME} is not: name the model of the endpoint")
    from agentscope.credential import OpenAICredential
    from agentscope.model import OpenAIChatModel

    credential = OpenAICredential.model_validate({"api_key": environ.get(KEY) or "none", "base_url": address})
    client = {} if http_client is None else {"http_client": http_client()}
    return OpenAIChatModel(credential, environ[NAME], client_kwargs=client)
