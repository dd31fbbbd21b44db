"""Save a run and go on with it, bit by bit: safetensors and JSON, checksums, no pickle, never half a file."""

from slangvi.checkpoint.api import describe as describe
from slangvi.checkpoint.api import from_state_dict as from_state_dict
from slangvi.checkpoint.api import load as load
from slangvi.checkpoint.api import previous_path as previous_path
from slangvi.checkpoint.api import save as save
from slangvi.checkpoint.api import state_dict as state_dict

__all__ = ["describe", "from_state_dict", "load", "previous_path", "save", "state_dict"]
