"""asyncpg, or a clear word about what is missing. The store's other modules import it from here or after this."""

from __future__ import annotations

from agentscope_durable.contracts.errors import MissingExtra

try:
    import asyncpg
except ImportError as error:
    raise MissingExtra("a store in PostgreSQL", "postgres") from error

__all__ = ["asyncpg"]
