"""The commands `slangvi reproduce`, `slangvi bench` and `slangvi data`."""
