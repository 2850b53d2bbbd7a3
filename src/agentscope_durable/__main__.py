"""`python -m agentscope_durable` is the command `durable`."""

from agentscope_durable.cli import entry

if __name__ == "__main__":
    entry()
