"""One file per method; in each: State, Info, init, update, sample, build, and the optimizer."""
