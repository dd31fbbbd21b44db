"""What is kept beside every measured number."""

from __future__ import annotations

import torch

from slangvi import environment


def test_an_environment_names_command_device_and_versions():
    about = environment.environment("slangvi dance", "cpu", 1.26)
    assert (about["command"], about["device_type"], about["seconds"]) == ("slangvi dance", "cpu", 1.3)
    assert about["torch"] == torch.__version__
    assert about["device"]
    assert len(about["date"]) == 10


def test_devices_have_the_name_of_their_makers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"chip of {device}")
    assert environment.device_name("cuda:1") == "chip of cuda:1"
    assert environment.device_name("cpu") == environment.cpu_name()


def test_processors_are_named_where_the_system_knows(tmp_path):
    listing = tmp_path / "cpuinfo"
    listing.write_text("processor\t: 0\nmodel name\t: Fast Chip 9000\nmodel name\t: Fast Chip 9000\n")
    assert environment.cpu_name(listing) == "Fast Chip 9000"
    assert environment.cpu_name(tmp_path / "none")
