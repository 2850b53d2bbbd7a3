"""Identities are derived, never drawn, so that deciding again decides the same (D10).

Sessions, Turns and Runs come from the commit's seed; everything below them from its parent and an
ordinal that the adapter knows beforehand.
"""

from __future__ import annotations

import base64
import hashlib


def commit_id(seed: bytes) -> str:
    return seed.hex()


def _derive(kind: str, *parts: str) -> str:
    # 80 bits in 16 characters: ids stand in every event, so each character counts.
    text = "\x00".join((kind, *parts)).encode("utf-8", "surrogatepass")
    return base64.b32encode(hashlib.sha256(text).digest()[:10]).decode().lower()


def object_tag(seed: bytes) -> str:
    """What tells the objects of one content apart: 64 bits, in hex because some disks fold case."""
    return hashlib.sha256(b"object\x00" + seed).hexdigest()[:16]


def turn_id(seed: bytes) -> str:
    return f"t{_derive('turn', seed.hex())}"


def run_id(turn: str, number: int) -> str:
    return f"{turn}.{number}"


def run_number(run: str) -> int:
    """The number of a Run within its Turn; 0 if this is no Run's id."""
    number = run.rpartition(".")[2]
    return int(number) if number.isdecimal() and number.isascii() else 0


def step_id(run: str, number: int) -> str:
    return f"{run}.s{number}"


def model_call_id(run: str, number: int) -> str:
    return f"{run}.m{number}"


def message_id(turn: str, reasoning: int) -> str:
    """Logical id of the assistant message of one reasoning round; the same over Runs (EV-16)."""
    return f"{turn}.r{reasoning}"


def input_message_id(turn: str) -> str:
    return f"{turn}.input"


def added_message_id(turn: str, ordinal: int) -> str:
    return f"{turn}.in{ordinal}"


def answer_message_id(interaction: str) -> str:
    return f"{interaction}.answer"


def execution_id(turn: str, call_id: str) -> str:
    return f"x{_derive('execution', turn, call_id)}"


def interaction_id(turn: str, call_id: str) -> str:
    return f"i{_derive('interaction', turn, call_id)}"
