"""AgentScope agents under Durable: `pip install 'agentscope-durable[agentscope]'`.

Importing this does not import AgentScope; making an adapter does.
"""

from agentscope_durable.adapters.agentscope.adapter import AdapterOptions, AgentScopeAdapter
from agentscope_durable.adapters.agentscope.baseline import AgentScopeCheckpointCodec, AgentScopeCheckpoints
from agentscope_durable.adapters.agentscope.binding import AgentBuilder, AgentFactory, Binding, RuntimeContext
from agentscope_durable.adapters.agentscope.context import current_origin, replaying
from agentscope_durable.adapters.agentscope.executor import AgentScopeToolExecutor
from agentscope_durable.adapters.agentscope.filesystem import RemoteFilesystem
from agentscope_durable.adapters.agentscope.mirror import AppStateStore
from agentscope_durable.adapters.agentscope.tools import ToolBinding, in_thread
from agentscope_durable.adapters.agentscope.workspace import DurableWorkspace, WorkspaceEntry, WorkspaceItem
from agentscope_durable.contracts.journal import STATE_VERSION
from agentscope_durable.journal.state_store import AGENT_STATE, AgentStateStore
from agentscope_durable.spi.executor import ToolError

__all__ = [
    "AGENT_STATE",
    "STATE_VERSION",
    "AdapterOptions",
    "AgentBuilder",
    "AgentFactory",
    "AgentScopeAdapter",
    "AgentScopeCheckpointCodec",
    "AgentScopeCheckpoints",
    "AgentScopeToolExecutor",
    "AgentStateStore",
    "AppStateStore",
    "Binding",
    "DurableWorkspace",
    "RemoteFilesystem",
    "RuntimeContext",
    "ToolBinding",
    "ToolError",
    "WorkspaceEntry",
    "WorkspaceItem",
    "current_origin",
    "in_thread",
    "replaying",
]
