"""The sockets: what a store, an agent library, an executor or a transport must promise to be plugged in.

Each Protocol names its promises; `agentscope_durable.testing` has a contract suite for each.
"""

from agentscope_durable.spi.backend import Heartbeat, SessionBackend, Wakeups
from agentscope_durable.spi.checkpoint import CheckpointCodec, JournalRow, NativeBaseline
from agentscope_durable.spi.environment import SYSTEM, Environment, SystemEnvironment
from agentscope_durable.spi.executor import (
    Cancelled,
    ExecutionRequest,
    Executor,
    ExecutorCapabilities,
    Failed,
    Outcome,
    Running,
    Succeeded,
    ToolError,
    Unknown,
)
from agentscope_durable.spi.harness import (
    Abandoned,
    HarnessAdapter,
    HarnessCapabilities,
    OpenInput,
    OpenWorkView,
    RunContext,
    RunStart,
    SettleContext,
    Settlement,
    SettleStart,
    StopCause,
)
from agentscope_durable.spi.live import LiveEvents, LiveListener, Preview
from agentscope_durable.spi.object_store import ObjectStore
from agentscope_durable.spi.policy import CommitPolicy, PolicyRequest, PolicyView
from agentscope_durable.spi.record_store import (
    Capabilities,
    Change,
    Entry,
    Erase,
    Need,
    Range,
    Reads,
    ReadyRow,
    ReadyScan,
    Records,
    RecordStore,
    Unchanged,
    View,
)

__all__ = [
    "SYSTEM",
    "Abandoned",
    "Cancelled",
    "Capabilities",
    "Change",
    "CheckpointCodec",
    "CommitPolicy",
    "Entry",
    "Environment",
    "Erase",
    "ExecutionRequest",
    "Executor",
    "ExecutorCapabilities",
    "Failed",
    "HarnessAdapter",
    "HarnessCapabilities",
    "Heartbeat",
    "JournalRow",
    "LiveEvents",
    "LiveListener",
    "NativeBaseline",
    "Need",
    "ObjectStore",
    "OpenInput",
    "OpenWorkView",
    "Outcome",
    "PolicyRequest",
    "PolicyView",
    "Preview",
    "Range",
    "Reads",
    "ReadyRow",
    "ReadyScan",
    "RecordStore",
    "Records",
    "RunContext",
    "RunStart",
    "Running",
    "SessionBackend",
    "SettleContext",
    "SettleStart",
    "Settlement",
    "StopCause",
    "Succeeded",
    "SystemEnvironment",
    "ToolError",
    "Unchanged",
    "Unknown",
    "View",
    "Wakeups",
]
