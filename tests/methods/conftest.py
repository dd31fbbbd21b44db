"""Graphs without a GPU."""

from graphing import cuda as cuda
from graphing import replays as replays
from graphing import taped as taped
