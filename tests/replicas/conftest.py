"""Graphs without a GPU."""

from helpers.fake_graphs import cuda as cuda
from helpers.fake_graphs import replays as replays
from helpers.fake_graphs import taped as taped
