"""One file per table or figure: its settings, a run, a plot."""
