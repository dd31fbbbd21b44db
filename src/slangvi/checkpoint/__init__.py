"""Save a run and go on with it, bit by bit: safetensors and JSON, checksums, no pickle, never half a file."""

from slangvi.checkpoint.api import describe as describe
from slangvi.checkpoint.api import load as load
from slangvi.checkpoint.api import previous_path as previous_path
from slangvi.checkpoint.api import save as save

__all__ = ["describe", "load", "previous_path", "save"]
