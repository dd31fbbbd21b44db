"""Data sets: made here, bundled with scikit-learn, or fetched into a cache."""
