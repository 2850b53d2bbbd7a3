"""The frame of a checkpoint: what proves that native rows are the ones that were committed, all of them.

Each native block is chained to the one before it, from the base on. A row that was altered, dropped or
added between base and checkpoint changes the digest, and the state is then not restored (BE-20, BE-21).
"""

from __future__ import annotations

import hashlib


def chained(digest: str, block: bytes) -> str:
    """The digest after one more native block, as stored; "" begins a new chain."""
    return hashlib.sha256(digest.encode() + block).hexdigest()[:32]
