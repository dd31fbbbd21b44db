"""Names that pickles of version 0.1 refer to."""
