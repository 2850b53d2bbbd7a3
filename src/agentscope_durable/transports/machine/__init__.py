"""Previews and hints between the processes of one machine, through sockets in a folder (D22).

Rule 1: nothing depends on it. What is lost costs a preview, or the time until the next poll; facts come from the store.
Rule 2: whoever publishes never waits. What a slow or dead peer cannot take is left out.
Rule 3: every process that opens the folder connects to all that are there already, so that each two have a connection
before either of them publishes anything.
"""

from __future__ import annotations

from agentscope_durable.transports.machine.bus import MachineBus, MachineLiveEvents, MachineWakeups

__all__ = ["MachineBus", "MachineLiveEvents", "MachineWakeups"]
