"""What nodes, launches and transfers take on this machine: measured by running small graphs, kept on disk."""

from __future__ import annotations
